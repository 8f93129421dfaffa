# SPDX-License-Identifier: Apache-2.0
"""Capture each pass of a drafter whole into a FULL CUDA graph.

A graph goes around the *call* of the draft model, not around `proposer.model`: class tests on the model need no
unwrapping, and a wrapper that the runner adds later nests inside. Graphs are captured into the drafter's own memory
pool: in the shared pool its replays may overwrite the target's output, which the runner reads again after drafting, for
prompt logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform

from vllm_hwplugin.spec_decode.decode_batch import GraphShape
from vllm_hwplugin.spec_decode.v1.draft_buffers import DraftBuffers
from vllm_hwplugin.spec_decode.v1.draft_decision import STEP_QUERY_LEN, FirstPass


class PassGraphs:
    """The graphs of one drafter's passes."""

    def __init__(self, proposer: Any, first: FirstPass, buffers: DraftBuffers):
        self.buffers = buffers
        self._proposer = proposer
        self._first = first
        # A new pool each time: a pool whose graphs are all gone may not be captured into again.
        self.graph_pool = current_platform.graph_pool_handle()
        self._graphs = full_graphs(self._call_model, proposer.vllm_config, self.graph_pool)

    def __call__(self, **inputs: Any) -> Any:
        """Call the draft model, by its graph if the context says FULL."""
        return self._graphs(**inputs)

    def _call_model(self, **inputs: Any) -> Any:
        return self._proposer.model(**inputs)

    @property
    def num_captured(self) -> int:
        """How many graphs there are; none once vLLM cleared the graphs that it captured to measure memory."""
        return len(self._graphs.concrete_cudagraph_entries)

    def capture(self, shape: GraphShape, template: Any) -> None:
        """Run the pass over a batch of `shape`, then capture it."""
        # Kernels must not compile or tune themselves during a capture.
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
            # Metadata for each run: the first kernel that reads FlashMLA's plans into it, and a captured kernel must.
            with self.forward_context(self.dummy_metadata(shape, template), shape, mode):
                self(**self.inputs(shape.num_tokens))

    def inputs(self, count: int) -> dict[str, Any]:
        """Return the draft model's arguments for the buffers' first `count` tokens."""
        proposer = self._proposer
        multimodal = proposer.supports_mm_inputs and not self._first.masks
        inputs = {
            "input_ids": None if multimodal else proposer.input_ids[:count],
            "positions": proposer._get_positions(count),
            "inputs_embeds": proposer.inputs_embeds[:count] if multimodal else None,
        }
        if proposer.pass_hidden_states_to_model and not self._first.masks:
            inputs["hidden_states"] = proposer.hidden_states[:count]
        return inputs

    def dummy_metadata(self, shape: GraphShape, template: Any) -> dict[str, Any]:
        """Return a dummy batch's per-layer metadata for `shape`, with padding slots only."""
        proposer = self._proposer
        _, per_layer = proposer.build_per_group_and_layer_attn_metadata(
            self.buffers.dummy(template, shape, proposer.max_model_len, causal=self._first.causal),
            draft_index=int(shape.query_len == STEP_QUERY_LEN),
        )
        return per_layer  # type: ignore[no-any-return]

    def forward_context(
        self, per_layer_metadata: dict[str, Any], shape: GraphShape, mode: CUDAGraphMode
    ) -> AbstractContextManager[None]:
        """Return vLLM's forward context for a pass over the buffers, by `shape`."""
        return set_forward_context(  # type: ignore[no-any-return]
            per_layer_metadata,
            self._proposer.vllm_config,
            num_tokens=shape.num_tokens,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor_of(shape),
            slot_mapping=self._proposer._get_slot_mapping(shape.num_tokens),
        )


def full_graphs(call: Callable[..., Any], config: Any, graph_pool: Any) -> CUDAGraphWrapper:
    """Wrap `call` for FULL capture, in a pool apart from the target's.

    No garbage collection runs before a capture: there are hundreds of shapes, and nothing to collect.
    """
    graphs = CUDAGraphWrapper(
        call,
        config,
        runtime_mode=CUDAGraphMode.FULL,
        cudagraph_options=CUDAGraphOptions(debug_log_enable=False, gc_disable=True),
    )
    graphs.graph_pool = graph_pool
    return graphs


def descriptor_of(shape: GraphShape) -> BatchDescriptor:
    """Return the key of this shape's graph in vLLM's `CUDAGraphWrapper`."""
    return BatchDescriptor(num_tokens=shape.num_tokens, num_reqs=shape.num_reqs, uniform=shape.query_len is not None)
