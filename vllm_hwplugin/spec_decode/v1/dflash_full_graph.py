# SPDX-License-Identifier: Apache-2.0
"""Capture the context part of a DFlash draft phase in its own CUDA graphs.

Before its one pass over the block, a DFlash drafter projects the target's hidden states to the keys and values of all
its layers and writes them into its cache: a norm, a GEMM, a copy, a norm, a rotation and one cache write per layer.
These kernels look at tokens, not at requests. So one graph for a number of tokens takes every batch of at most that
many, decode or prefill: padding has slots of `PADDING_SLOT_ID`, which cache writes skip.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import DFLASH_FULL_GRAPH
from vllm_hwplugin.spec_decode.graph_recording import Graphs
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys, pad_up
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, full_graphs
from vllm_hwplugin.spec_decode.weights import FusedWeights


def lengthen_query_buffers(proposer: Any) -> None:
    """Let a `DFlashProposer`'s query buffers hold the longest padded batch.

    vLLM's buffers are sized separately: `input_ids` for the scheduler's token budget, which a batch of many short
    requests exceeds with its 1 + k queries each; slots and positions (before 0.27.0) for the longest real batch, which
    a piecewise graph may pad further. Reading past either is an illegal access or a shape error.
    """
    largest = max(proposer.max_query_tokens, proposer.compilation_config.max_cudagraph_capture_size or 0)
    for name in ("input_ids", "positions", "_slot_mapping_buffer"):
        rows = getattr(proposer, name)
        if rows.shape[0] < largest:
            setattr(proposer, name, rows.new_zeros(largest))


class ContextGraphs(Graphs[CUDAGraphWrapper]):
    """The context graphs of one `DFlashProposer`, which holds it as `draft_context`."""

    feature, effect = DFLASH_FULL_GRAPH, "a DFlash drafter's context is stored as in unpatched vLLM"

    def __init__(self, proposer: Any, draft_graphs: DraftGraphs):
        super().__init__(proposer)
        self._draft_graphs = draft_graphs

    def forget(self) -> None:
        super().forget()
        self._sizes: tuple[int, ...] = ()
        self._fused: FusedWeights | None = None

    def capture(self, passes: PassGraphs, keys: DraftKeys, template: Any) -> None:
        """Capture each decode batch's context; padding slots write no KV cache."""
        self.forget()
        proposer = self._owner
        block = 1 + proposer.speculative_config.num_speculative_tokens
        self._sizes = tuple(count * block for count in keys.requests(block) if count * block <= proposer.max_num_tokens)

        def record(size: int) -> None:
            graphs = self.captured or full_graphs(self.precompute, proposer.vllm_config, passes.graph_pool)
            self.captured = graphs
            proposer._context_slot_mapping_buffer[:size].fill_(PADDING_SLOT_ID)
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                self._launch(graphs, size, mode)

        for size in reversed(self._sizes):
            if not self.attempt(partial(record, size), passes.graph_pool):
                return
        self._fused = FusedWeights(proposer.model)
        run_records.note(DFLASH_FULL_GRAPH, f"context keys and values in graphs of {list(self._sizes)} tokens")

    def store(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write a batch's context into the drafter's cache, by graph if possible.

        Args:
            states: [tokens, hidden], the combined hidden states of the target.
            positions: int64 [tokens], the leading part of the proposer's context positions.
            slots: int64 [tokens], the leading part of the proposer's context slots.
        """
        proposer, count = self._owner, states.shape[0]
        padded = pad_up(self._sizes, count) if self._draft_graphs.ready else None
        graphs = self.captured
        if graphs is None or padded is None or not self.keep_fused_in_place():
            proposer.model.precompute_and_store_context_kv(states, positions, slots)
            return
        proposer.hidden_states[:count].copy_(states)
        if padded > count:
            proposer._context_slot_mapping_buffer[count:padded].fill_(PADDING_SLOT_ID)
        self._launch(graphs, padded, CUDAGraphMode.FULL)

    def keep_fused_in_place(self) -> bool:
        """Whether newly fused weights could be copied to the graphs' tensors.

        After one False the answer stays False: graphs of other features hold the context, too.
        """
        if self._fused is None:
            return False
        reason = self._fused.keep_in_place()
        if reason is not None:
            self.give_up(reason)
        return reason is None

    def _launch(self, graphs: CUDAGraphWrapper, count: int, mode: CUDAGraphMode) -> None:
        with set_forward_context(
            None,
            self._owner.vllm_config,
            num_tokens=count,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens=count),
        ):
            graphs(count=count)

    def precompute(self, count: int) -> torch.Tensor:
        """Store the first `count` tokens' context; return [count, hidden] for `CUDAGraphWrapper`."""
        proposer = self._owner
        states: torch.Tensor = proposer.hidden_states[:count]
        proposer.model.precompute_and_store_context_kv(
            states, proposer._context_positions_buffer[:count], proposer._context_slot_mapping_buffer[:count]
        )
        return states
