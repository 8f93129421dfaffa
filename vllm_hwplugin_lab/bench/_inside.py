# SPDX-License-Identifier: Apache-2.0
"""Facts about an engine in this process; vLLM has no public access to most of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_hwplugin.base.errors import HwpluginError

from ._entry_points import installed

#: The package of Model Runner V2, in all supported versions.
_V2_PACKAGE = "vllm.v1.worker.gpu."


#: Part of a step, attribute of a runner, and method; drafting is in :func:`drafting_of`.
_REPLAYING = (
    ("inputs", "step_inputs", "prepare_inputs"),  # V1
    ("inputs", "step_inputs", "steady"),  # V2
    ("sampling", "draft_phase", "sample"),  # V1
    ("sampling", "tail_graphs", "sample"),  # V2
)


class WrongRunner(HwpluginError, RuntimeError):
    """vLLM chose another model runner than the one to measure."""


def engine_core(llm: Any) -> Any | None:
    """Return the engine core; None: it runs in another process."""
    return getattr(llm.llm_engine.engine_core, "engine_core", None)


def model_runner(llm: Any) -> Any | None:
    """Return the model runner; None: it runs in another process."""
    core = engine_core(llm)
    return None if core is None else core.model_executor.driver_worker.worker.model_runner


def drafter_of(runner: Any) -> Any | None:
    """Return the object with ``propose``: V1's drafter, V2's speculator."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def drafting_of(runner: Any) -> Any | None:
    """Return the object whose ``propose`` a step calls.

    It is the drafter, or the plugin's wrapper of V1 or V2.
    """
    return getattr(runner, "draft_phase", None) or getattr(runner, "tail_graphs", None) or drafter_of(runner)


def replaying(runner: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield step part, owner and method of the plugin's other replays.

    A patched runner calls these methods in each step, with or without a graph.
    """
    for part, holder, method in _REPLAYING:
        owner = getattr(runner, holder, None)
        if hasattr(owner, method):
            yield part, owner, method


def runner_generation(runner: Any) -> str:
    """Return ``V1`` or ``V2``."""
    return "V2" if type(runner).__module__.startswith(_V2_PACKAGE) else "V1"


def check_runner(runner: Any) -> None:
    """Raise WrongRunner unless the runner is ``VLLM_USE_V2_MODEL_RUNNER``'s."""
    # A side on another runner would be measured under a wrong name.
    setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    generation = runner_generation(runner)
    if setting in ("0", "1") and generation != ("V2" if setting == "1" else "V1"):
        raise WrongRunner(
            f"VLLM_USE_V2_MODEL_RUNNER={setting}, but vLLM runs {type(runner).__module__} (Model Runner {generation}): "
            "this engine cannot be measured as that side; omit the side, or use a vLLM that runs it"
        )


def graph_modes(runner: Any) -> dict[str, str]:
    """Return the CUDA graph modes of target and drafter."""
    return dict(_modes(runner))


def _modes(runner: Any) -> Iterator[tuple[str, str]]:
    for name, owner in (("target", runner), ("drafter", drafter_of(runner))):
        dispatcher = getattr(owner, "cudagraph_dispatcher", None)
        if getattr(getattr(owner, "draft_graphs", None), "ready", False):
            yield name, "FULL"  # the plugin's graphs, which vLLM's dispatcher does not know
            continue
        managers = ("cudagraph_manager", "query_cudagraph_manager", "decode_cudagraph_manager")
        for holder in (dispatcher, *(getattr(owner, manager, None) for manager in managers)):
            mode = getattr(holder, "cudagraph_mode", None)
            if mode is not None:
                yield name, mode.name
                break


def counters(llm: Any) -> dict[str, Any]:
    """Return :func:`totals` of an ``LLM``."""
    return totals(llm.get_metrics())


def totals(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return vLLM's counts so far, from its ``get_metrics_snapshot``.

    ``steps`` of the scheduler, ``tokens``, ``drafts``, and ``accepted`` drafts by position.
    """
    counts: dict[str, Any] = {"steps": 0, "tokens": 0, "drafts": 0, "accepted": []}
    for metric in metrics:
        if metric.name == "vllm:iteration_tokens_total":
            counts["steps"] += metric.count  # a histogram with one value per scheduler iteration
        elif metric.name == "vllm:generation_tokens":
            counts["tokens"] += metric.value
        elif metric.name == "vllm:spec_decode_num_drafts":
            counts["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            counts["accepted"] = list(metric.values)
    return counts


def ready_facts(llm: Any) -> dict[str, Any]:
    """Return the facts of a new engine; raises as :func:`check_runner`."""
    runner = model_runner(llm)
    facts = {**package_facts(), "num_gpu_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
    return facts if runner is None else {**facts, **runner_facts(runner)}


def package_facts() -> dict[str, Any]:
    """Return the versions and the platform of this process."""
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        # A plain string: other processes unpickle it without torch.
        "torch": str(torch.__version__),
        "platform": platform_class(),
        "entry_points": installed(),
    }


def runner_facts(runner: Any) -> dict[str, Any]:
    """Return a model runner's generation and graph modes; raises as :func:`check_runner`."""
    check_runner(runner)
    return {"model_runner": runner_generation(runner), "graph_modes": graph_modes(runner)}


def platform_class() -> str:
    """Return the qualified name of vLLM's platform class."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return f"{kind.__module__}.{kind.__qualname__}"
