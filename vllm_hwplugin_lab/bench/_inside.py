# SPDX-License-Identifier: Apache-2.0
"""What an engine in this process turned out to be. vLLM has no public way to most of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_hwplugin.errors import HwpluginError

from ._entry_points import installed

#: Each model runner lives in a package of its own, in all supported versions.
_V2_PACKAGE = "vllm.v1.worker.gpu."


#: Part of a step, attribute of a runner, and method; drafting is in :func:`drafting_of`.
_REPLAYING = (
    ("inputs", "step_inputs", "prepare_inputs"),  # V1
    ("inputs", "step_inputs", "steady"),  # V2
    ("sampling", "draft_phase", "sample"),  # V1
    ("sampling", "tail_graphs", "sample"),  # V2
)


class WrongRunner(HwpluginError, RuntimeError):
    """vLLM chose another model runner than the one that is to be measured."""


def engine_core(llm: Any) -> Any | None:
    """The engine core; None where it is another process, by the caller's own choice."""
    return getattr(llm.llm_engine.engine_core, "engine_core", None)


def model_runner(llm: Any) -> Any | None:
    """The model runner; None where the engine core is another process, by the caller's own choice."""
    core = engine_core(llm)
    return None if core is None else core.model_executor.driver_worker.worker.model_runner


def drafter_of(runner: Any) -> Any | None:
    """What has ``propose``: V1 calls it the drafter, V2 the speculator."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def drafting_of(runner: Any) -> Any | None:
    """Whose ``propose`` a step calls: the drafter, or what the plugin puts before it, in V1 or in V2."""
    return getattr(runner, "draft_phase", None) or getattr(runner, "tail_graphs", None) or drafter_of(runner)


def replaying(runner: Any) -> Iterator[tuple[str, Any, str]]:
    """Where else the plugin's features replay graphs: the part of a step, an object of the runner, and its method.

    These are the methods that a patched runner calls in each step, whether or not a graph serves it.
    """
    for part, holder, method in _REPLAYING:
        owner = getattr(runner, holder, None)
        if hasattr(owner, method):
            yield part, owner, method


def runner_generation(runner: Any) -> str:
    """``V1`` or ``V2``."""
    return "V2" if type(runner).__module__.startswith(_V2_PACKAGE) else "V1"


def check_runner(runner: Any) -> None:
    """Compare with ``VLLM_USE_V2_MODEL_RUNNER``: a side that runs something else would be measured under a wrong name.

    Raises:
        WrongRunner: they differ.
    """
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    found = runner_generation(runner)
    if asked in ("0", "1") and found != ("V2" if asked == "1" else "V1"):
        raise WrongRunner(
            f"VLLM_USE_V2_MODEL_RUNNER={asked}, but vLLM runs {type(runner).__module__} (Model Runner {found}): "
            "this engine cannot be measured as that side"
        )


def graph_modes(runner: Any) -> dict[str, str]:
    """What the target's and the drafter's CUDA graphs settled on, as vLLM names it."""
    return dict(_modes(runner))


def _modes(runner: Any) -> Iterator[tuple[str, str]]:
    for name, owner in (("target", runner), ("drafter", drafter_of(runner))):
        dispatcher = getattr(owner, "cudagraph_dispatcher", None)
        if getattr(getattr(owner, "draft_graphs", None), "ready", False):
            yield name, "FULL"  # the features have graphs of their own, which vLLM's dispatcher does not know
            continue
        managers = ("cudagraph_manager", "query_cudagraph_manager", "decode_cudagraph_manager")
        for holder in (dispatcher, *(getattr(owner, manager, None) for manager in managers)):
            mode = getattr(holder, "cudagraph_mode", None)
            if mode is not None:
                yield name, mode.name
                break


def counters(llm: Any) -> dict[str, Any]:
    """:func:`totals` of an ``LLM``."""
    return totals(llm.get_metrics())


def totals(metrics: Iterable[Any]) -> dict[str, Any]:
    """vLLM's own counts so far: ``steps`` of the scheduler, ``tokens``, ``drafts``, ``accepted`` drafts by position.

    Args:
        metrics: of vLLM's ``get_metrics_snapshot``.
    """
    found: dict[str, Any] = {"steps": 0, "tokens": 0, "drafts": 0, "accepted": []}
    for metric in metrics:
        if metric.name == "vllm:iteration_tokens_total":
            found["steps"] += metric.count  # a histogram that is fed once a scheduler iteration
        elif metric.name == "vllm:generation_tokens":
            found["tokens"] += metric.value
        elif metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


def ready_facts(llm: Any) -> dict[str, Any]:
    """What a new engine says of itself.

    Raises:
        WrongRunner: see :func:`check_runner`.
    """
    runner = model_runner(llm)
    facts = {**package_facts(), "num_gpu_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
    return facts if runner is None else {**facts, **runner_facts(runner)}


def package_facts() -> dict[str, Any]:
    """What this process runs, whether or not an engine is in it."""
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        # No class of torch's own: it goes from process to process.
        "torch": str(torch.__version__),
        "platform": platform_class(),
        "entry_points": installed(),
    }


def runner_facts(runner: Any) -> dict[str, Any]:
    """What a model runner turned out to be.

    Raises:
        WrongRunner: see :func:`check_runner`.
    """
    check_runner(runner)
    return {"model_runner": runner_generation(runner), "graph_modes": graph_modes(runner)}


def platform_class() -> str:
    """The qualified name of the platform class that vLLM runs on."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return f"{kind.__module__}.{kind.__qualname__}"
