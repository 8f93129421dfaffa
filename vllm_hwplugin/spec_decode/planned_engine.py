# SPDX-License-Identifier: Apache-2.0
"""Foresee which features an engine will use, only from its `VllmConfig`, before anything is built.

The answers come from the tables that a worker asks when it is built (`worker_use`, `obstacles`). What these tables ask
of a runner or a drafter that does not exist yet is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from packaging.version import Version

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.features import V2_DRAFT_HEAD, V2_STEP_INPUTS, V2_TAIL_GRAPH, gate_of
from vllm_hwplugin.base.run_records import RunRecord, Use
from vllm_hwplugin.spec_decode.capture_sizes import uses_v2
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS
from vllm_hwplugin.spec_decode.engine_report import Unused, use_of
from vllm_hwplugin.spec_decode.obstacles import OBSTACLES, PARTS, WITHOUT_DRAFTS, Part
from vllm_hwplugin.spec_decode.worker_use import why_unused

#: The parts about which the table asks the drafter; it asks the runner about all other parts.
_OF_DRAFTER: Final = Part.V1_PASSES | Part.V1_CHAIN | Part.V2_STEPS
#: What a `GPUModelRunner` of either runner takes from its configuration under the same name.
_CONFIGS: Final = (
    *("model_config", "cache_config", "lora_config", "parallel_config", "scheduler_config"),
    *("speculative_config", "compilation_config"),
)


class NotBuilt(HwpluginError):
    """A part of the engine is asked for that exists only when the engine is built."""


class Foreseen(NamedTuple):
    """What is known about a feature before the engine is built.

    Attributes:
        use: whether the engine will use it, as far as that is known.
        left: part of the feature -> why that part stays vLLM's, if the feature is used without it.
        unknown: reasons not to use it, or a part of it, that may or may not hold.
    """

    use: Use
    left: Mapping[str, str]
    unknown: tuple[str, ...]


class _NameNotKnown(type):
    """The type of a class whose name would be taken for vLLM's choice of a drafter."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise NotBuilt("__name__")


class _Planned(metaclass=_NameNotKnown):
    """A runner or a drafter that has its configuration and nothing else."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        # Not an AttributeError: `hasattr` and `getattr` with a default would take that for an answer.
        raise NotBuilt(name)


def foresee(config: Any, entry: RunRecord) -> dict[str, Foreseen]:
    """Return what is known of each feature that works in a worker."""
    v2 = uses_v2(config)
    spec = config.speculative_config
    configs = {name: getattr(config, name) for name in _CONFIGS} | {"vllm_config": config}
    # A drafter by masks has it under any configuration.
    in_parallel = spec is not None and (spec.method in MASK_METHODS or getattr(spec, "parallel_drafting", False))
    drafter = None if spec is None else _Planned(**configs, parallel_drafting=in_parallel)
    runner = _Planned(
        **configs,
        **{"speculator" if v2 else "drafter": drafter},
        max_num_reqs=config.scheduler_config.max_num_seqs,
        adaptive_verification=getattr(spec, "enable_adaptive_verification", False) or None,
    )
    mode = config.compilation_config.cudagraph_mode
    if not (mode.separate_routine() and mode.decode_mode().name == "FULL"):
        # vLLM may take FULL graphs away when it knows the attention backends; it never adds them.
        graphs = _Planned(cudagraph_mode=mode)
        vars(runner).update(cudagraph_manager=graphs, cudagraph_dispatcher=graphs)
    # By default there is no copy of the head before 0.33 (`draft_head.why_not_by_default`).
    if gates.read(gate_of(V2_DRAFT_HEAD)).text == "auto" and Version(entry.vllm_version or "0") < Version("0.33"):
        vars(runner)["draft_head"] = None
    worker = SimpleNamespace(vllm_config=config, model_runner=runner, use_v2_model_runner=v2)
    foreseen = {
        name: _foresee(reasons, PARTS.get(name, {}), runner, drafter)
        for name, reasons in why_unused(worker, entry).items()
    }
    inputs, tail = foreseen.get(V2_STEP_INPUTS), foreseen.get(V2_TAIL_GRAPH)
    if inputs is not None and inputs.use["used"] and tail is not None and not tail.use["used"]:
        # Both are captured together.
        foreseen[V2_STEP_INPUTS] = tail
    return foreseen


def _foresee(reasons: Iterable[Unused], parts: Mapping[str, Part], runner: Any, drafter: Any) -> Foreseen:
    unknown: dict[str, None] = {}
    for reason in reasons:
        try:
            use = use_of([reason])
        except NotBuilt:
            # The table of obstacles says more about it.
            unknown |= {} if reason.text == "{}" else {reason.text: None}
        else:
            if not use["used"]:
                return Foreseen(use, {}, ())
    if drafter is None:
        parts = {name: part for name, part in parts.items() if part & WITHOUT_DRAFTS}
    left = {}
    for name, part in parts.items():
        holding, open_ = _obstacles(part, drafter if part & _OF_DRAFTER else runner)
        unknown |= dict.fromkeys(open_)
        if holding:
            left[name] = "; ".join(holding)
    if parts and len(left) == len(parts):
        return Foreseen(Use(used=False, reason="; ".join(dict.fromkeys(left.values()))), {}, ())
    return Foreseen(Use(used=True, reason=""), left, tuple(unknown))


def _obstacles(part: Part, owner: Any) -> tuple[list[str], list[str]]:
    """Return the reasons not to capture a part, and the unknown ones."""
    holding, open_ = [], []
    for row in OBSTACLES:
        if row.hinders & part:
            try:
                obstacle = row.find(owner)
            except NotBuilt:
                open_.append(row.reason.format("..."))
            else:
                holding += [row.reason.format(obstacle)] if obstacle else []
    return holding, open_
