# SPDX-License-Identifier: Apache-2.0
"""Refuse speculative decoding with pipeline parallelism where vLLM's first stage does not know the drafts."""

from __future__ import annotations

from typing import Any, Final

from vllm_hwplugin.base.features import BACKPORT_PIPELINE_DRAFTS, gate_of

#: What goes wrong on a stage that does not draft, by vLLM's names for its model runners.
_FAULTS: Final = {
    "V1": "each stage but the last looks for a drafter that only the last one has, and the engine ends",
    "V2": "the drafts stay on the last stage, the first one reads other tokens in their place, and texts go wrong",
}


def refuse_pipeline_drafts(vllm_config: Any, runner: str) -> None:
    """Refuse drafts on several pipeline stages, before a drafter is made.

    Args:
        runner: ``V1`` or ``V2``.

    Raises:
        ValueError: there is more than one stage, and speculative decoding.
    """
    spec, stages = vllm_config.speculative_config, vllm_config.parallel_config.pipeline_parallel_size
    if spec is None or stages == 1:
        return
    others = "tensor_parallel_size in its place, leave speculative_config out, or use vLLM 0.30 or newer with"
    raise ValueError(
        f"pipeline_parallel_size={stages} with speculative_config.method={spec.method!r}: Model Runner {runner} of "
        f"this vLLM drafts with pipeline_parallel_size=1 only. With more stages {_FAULTS[runner]}. Use {others} "
        f"Model Runner V2. {gate_of(BACKPORT_PIPELINE_DRAFTS)}=off leaves it to vLLM."
    )
