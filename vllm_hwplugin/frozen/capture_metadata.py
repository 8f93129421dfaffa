# SPDX-License-Identifier: Apache-2.0
"""Build attention metadata for each shape in which a drafter's first pass is captured.

Up to 0.25 vLLM's Model Runner V2 captures the draft's first pass with the metadata objects that the target's capture
left behind. They are views into buffers that each further capture overwrites: lengths, positions and the schedule of
FlashAttention 3 belong to the last shape. A replay is correct, because a step writes the buffers first. But the kernels
also run once before they are captured. With another shape's schedule they may read out of bounds, and the start ends.
Here metadata is built for each capture, as in vLLM from 0.26.0 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from vllm_hwplugin.base.features import V2_CAPTURE_METADATA
from vllm_hwplugin.spec_decode.graph_recording import attempt_capture, known_arguments

_STOCK: Final = "the draft's first pass is captured with metadata that the target's capture left"


class RebuiltStates(Mapping[Any, Any]):
    """vLLM's attention states by shape; each look-up builds new states."""

    def __init__(self, runner: Any, states: Mapping[Any, Any]):
        self._runner, self._states = runner, states

    def __getitem__(self, desc: Any) -> Any:
        left, runner = self._states[desc], self._runner
        pair = hasattr(left, "captured")
        made = prepare_inputs_to_capture(
            desc.num_reqs or min(desc.num_tokens, runner.max_num_reqs),
            desc.num_tokens,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            skip_attn=(left.captured if pair else left).attn_metadata is None,
            # Taken where vLLM's function has `backport-mixed-graphs`.
            **known_arguments(prepare_inputs_to_capture, max_query_len=desc.uniform_token_count or desc.num_tokens),
        )
        # From 0.23 on a second state is for the run before the capture; a caller uses only one of the two.
        return type(left)(made, made) if pair else made

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def captured_draft(runner: Any, states: Mapping[Any, Any]) -> bool:
    """Capture the drafter's graphs with metadata of their shapes, or return False.

    The runner's graphs have just been captured; `states` are `cudagraph_manager.capture`'s, by
    `BatchExecutionDescriptor`.

    Raises:
        FeatureRequired: the capture failed, and the switch is `on`.
    """
    speculator = runner.speculator
    candidates = (getattr(speculator, f"{kind}_cudagraph_manager", None) for kind in ("prefill", "decode"))
    managers = [manager for manager in candidates if manager is not None]
    if not managers:
        # DFlash's capture asks for no states.
        return False
    capture = partial(speculator.capture, RebuiltStates(runner, states))
    return attempt_capture(V2_CAPTURE_METADATA, _STOCK, capture, managers, runner.device)
