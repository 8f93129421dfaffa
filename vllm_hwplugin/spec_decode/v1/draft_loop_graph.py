# SPDX-License-Identifier: Apache-2.0
"""Capture the drafter's whole chain of one-token steps in one CUDA graph.

Between the passes of `draft_full_graph` the host samples, advances positions and sequence lengths, builds metadata and
copies inputs: some ten launches per step. All of that can be captured if the draft attention backend's metadata holds
only views of buffers that the chain itself advances. One launch then takes the first pass's hidden states to all k
draft tokens. Sampled drafts, and another number of draft tokens than the configured one, take the path of
`draft_full_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID, eagle_step_update_slot_mapping_and_metadata

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import DRAFT_LOOP_GRAPH
from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.graph_recording import Graphs
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v1.draft_buffers import PassBuffers
from vllm_hwplugin.spec_decode.v1.draft_decision import STEP_QUERY_LEN, DraftKeys, pad_up
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, full_graphs


class ChainGraphs:
    """The chain graphs of one drafter, and what they read.

    Args:
        passes: the graphs of the drafter's passes, whose buffers the chain advances.
        ladder: numbers of requests.
    """

    def __init__(self, proposer: Any, passes: PassGraphs, ladder: tuple[int, ...]):
        self.ladder, self.num_tokens = ladder, proposer.speculative_config.num_speculative_tokens
        self._proposer, self._passes = proposer, passes
        self._metadata: dict[int, dict[str, Any]] = {}
        max_reqs, device = proposer.vllm_config.scheduler_config.max_num_seqs, proposer.device
        self._drafts = torch.zeros((max_reqs, self.num_tokens), dtype=torch.int64, device=device)
        self._sample_hidden = torch.zeros((max_reqs, proposer.hidden_size), dtype=proposer.dtype, device=device)
        chain = partial(self._chain, sample=proposer._greedy_sample)
        self._graphs = full_graphs(chain, proposer.vllm_config, passes.graph_pool)

    @property
    def buffers(self) -> PassBuffers:
        """The buffers of one-token passes."""
        return self._passes.buffers.of(_shape(1))

    def record(self, num_reqs: int, template: Any) -> None:
        """Capture the chain of `num_reqs` requests; inert rows write no KV cache."""
        self._metadata[num_reqs] = self._passes.dummy_metadata(_shape(num_reqs), template)
        self.buffers.write_even_starts(0, num_reqs)
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
            self._launch(num_reqs, mode)

    def replay(
        self, num_reqs: int, sample_hidden_states: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Draft by the graph of `num_reqs` requests; return a new tensor.

        The arguments are as for `draft`, for a batch without padding.
        """
        batch = len(positions)
        self._sample_hidden[:batch].copy_(sample_hidden_states)
        self._proposer.positions[:batch].copy_(positions)
        self._proposer.hidden_states[:batch].copy_(hidden_states)
        self._launch(num_reqs, CUDAGraphMode.FULL)
        return self._drafts[:batch].clone()

    def draft(
        self,
        num_reqs: int,
        sample_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        seq_lens: torch.Tensor,
        sample: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Launch the chain of `num_reqs` requests inside a larger graph's capture.

        Args:
            num_reqs: padded; each tensor has this many rows.
            sample_hidden_states: [num_reqs, hidden] of the first pass, at each request's last accepted token.
            positions: int64 [num_reqs], of the same tokens.
            hidden_states: [num_reqs, hidden], what the next step reads.
            seq_lens: int32 [num_reqs], without rejected tokens.
            sample: makes draft tokens of hidden states, [num_reqs, hidden].

        Returns:
            int64 [num_reqs, num_speculative_tokens], which the next chain overwrites.
        """
        proposer = self._proposer
        self.buffers.seq_lens[:num_reqs].copy_(seq_lens)
        self._sample_hidden[:num_reqs].copy_(sample_hidden_states)
        proposer.positions[:num_reqs].copy_(positions)
        proposer.hidden_states[:num_reqs].copy_(hidden_states)
        with self._passes.forward_context(self._metadata[num_reqs], _shape(num_reqs), CUDAGraphMode.FULL):
            return self._chain(num_reqs, sample)

    def _launch(self, num_reqs: int, mode: CUDAGraphMode) -> None:
        with self._passes.forward_context(self._metadata[num_reqs], _shape(num_reqs), mode):
            self._graphs(num_reqs=num_reqs)

    def _chain(self, num_reqs: int, sample: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run the chain in vLLM's order of operations; int64 [num_reqs, num_speculative_tokens]."""
        # It is captured, so every tensor here is persistent or the graph's own.
        proposer = self._proposer
        slots = proposer._slot_mapping_buffer[:num_reqs]
        seq_lens, inert = self.buffers.seq_lens[:num_reqs], self.buffers.inert[:num_reqs]
        block_table = self._passes.buffers.block_table(num_reqs)
        inputs = self._passes.inputs(num_reqs)
        positions, hidden = inputs["positions"], proposer.hidden_states[:num_reqs]
        tokens = sample(self._sample_hidden[:num_reqs])
        self._drafts[:num_reqs, 0].copy_(tokens)
        for step in range(1, self.num_tokens):
            eagle_step_update_slot_mapping_and_metadata(
                positions_1d=positions,
                block_table_tensor=block_table,
                seq_lens=seq_lens,
                block_size=proposer.block_size,
                max_model_len=proposer.max_model_len,
                out_clamped_positions=positions,
                out_slot_mapping=slots,
                input_batch_size=num_reqs,
            )
            # The kernel takes its count of real rows from the host, where a graph cannot change it.
            slots.masked_fill_(inert, PADDING_SLOT_ID)
            seq_lens.masked_fill_(inert, 0)
            inputs["input_ids"].copy_(tokens)
            output = proposer.model(**inputs)
            last_hidden, next_hidden = output if proposer.model_returns_tuple() else (output, output)
            if step + 1 < self.num_tokens:
                hidden.copy_(next_hidden)
            tokens = sample(last_hidden)
            self._drafts[:num_reqs, step].copy_(tokens)
        return self._drafts[:num_reqs]


class DraftLoop(Graphs[ChainGraphs]):
    """The chain graphs of one `SpecDecodeBaseProposer`, which holds it as `draft_loop`."""

    feature, effect = DRAFT_LOOP_GRAPH, "steps are launched one by one"

    def __init__(self, proposer: Any, draft_graphs: DraftGraphs):
        super().__init__(proposer)
        self._draft_graphs = draft_graphs
        self._step_counts = StepCounts(DRAFT_LOOP_GRAPH, "steps")

    def capture(self, passes: PassGraphs, keys: DraftKeys, template: Any) -> None:
        """Capture a graph per request count."""
        self.forget()
        if (reason := why_not(self._owner, Part.V1_CHAIN)) is not None:
            self.stay_stock(reason)
            return
        ladder = keys.requests(STEP_QUERY_LEN)

        def record(num_reqs: int | None) -> None:
            chain = self.captured = self.captured or ChainGraphs(self._owner, passes, ladder)
            if num_reqs is not None:
                chain.record(num_reqs, template)

        # The buffers by themselves first, as for the passes.
        for num_reqs in (None, *reversed(ladder)):
            if not self.attempt(partial(record, num_reqs), passes.graph_pool):
                return
        steps = self._owner.speculative_config.num_speculative_tokens - 1
        run_records.note(DRAFT_LOOP_GRAPH, f"{steps} steps in one graph for {list(ladder)} requests")

    def serves(self, num_reqs: int) -> bool:
        """Whether there is a chain of `num_reqs` requests."""
        return self.captured is not None and num_reqs in self.captured.ladder

    def run(
        self,
        *,
        sample_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: Any,
        num_rejected_tokens: torch.Tensor | None,
        sampling_metadata: Any,
    ) -> torch.Tensor | None:
        """Draft every token in one launch, or return None without a graph.

        The tensors are as for `ChainGraphs.draft`, for a batch without padding. The result is a new tensor.

        Args:
            metadata: the `CommonAttentionMetadata` of the first pass; not changed.
            num_rejected_tokens: int32 [batch], to be subtracted from `metadata.seq_lens`.
            sampling_metadata: the target's; only greedy drafting is captured.
        """
        graph = self._chain_for(metadata, sampling_metadata)
        if self._step_counts.missed(graph):
            return None
        chain, num_reqs = graph
        chain.buffers.write_seq_lens(metadata.seq_lens, num_reqs)
        if num_rejected_tokens is not None:
            chain.buffers.seq_lens[: metadata.num_reqs].sub_(num_rejected_tokens)
        chain.buffers.write_even_starts(metadata.num_reqs, num_reqs)
        return chain.replay(num_reqs, sample_hidden_states, positions, hidden_states)

    def _chain_for(self, metadata: Any, sampling_metadata: Any) -> tuple[ChainGraphs, int] | Reason:
        """Return this batch's chain and padded request count, or a reason."""
        proposer, chain = self._owner, self.captured
        if chain is None or not chain.ladder:
            return Reason.NOT_CAPTURED
        if proposer.num_speculative_tokens != chain.num_tokens:
            return Reason.FEWER_DRAFTS
        if getattr(proposer, "_enable_probabilistic_draft_probs", False) and not sampling_metadata.all_greedy:
            return Reason.SAMPLING_PARAMETERS
        num_reqs = pad_up(chain.ladder, metadata.num_reqs)
        if num_reqs is None:
            return Reason.LARGER_BATCH
        return (chain, num_reqs) if self._draft_graphs.may_replay(metadata) else Reason.MOVED


def _shape(num_reqs: int) -> GraphShape:
    return uniform_shape(STEP_QUERY_LEN, num_reqs)
