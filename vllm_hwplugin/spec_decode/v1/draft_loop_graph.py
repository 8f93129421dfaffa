# SPDX-License-Identifier: Apache-2.0
"""Capture the drafter's whole chain of one-token steps in one CUDA graph.

`draft_full_graph` makes each pass one launch, but between passes the host still samples, advances positions and
sequence lengths, builds metadata and copies inputs: some ten launches per step. All of that can be captured if the
draft attention backend's metadata holds only views of buffers that the chain itself advances. One launch then takes the
first pass's hidden states to all k draft tokens.

It applies to greedy drafting, which is vLLM's default. Batches that it does not cover (sampled drafts, another number
of draft tokens than the configured one) take the path of `draft_full_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID, eagle_step_update_slot_mapping_and_metadata

from vllm_hwplugin import journal
from vllm_hwplugin.features import DRAFT_LOOP_GRAPH
from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.graph_recording import Graphs
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v1.draft_buffers import PassBuffers
from vllm_hwplugin.spec_decode.v1.draft_decision import STEP_QUERY_LEN, DraftKeys, pad_up
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, full_graphs


class DraftLoop(Graphs[CUDAGraphWrapper]):
    """The chain graphs of one `SpecDecodeBaseProposer`, which holds it as `draft_loop`."""

    feature, effect = DRAFT_LOOP_GRAPH, "steps are launched one by one"

    def __init__(self, proposer: Any, draft_graphs: DraftGraphs):
        super().__init__(proposer)
        self._draft_graphs = draft_graphs
        self._num_tokens = 0
        self._step_counts = StepCounts(DRAFT_LOOP_GRAPH, "steps")

    def forget(self) -> None:
        super().forget()
        self._passes: PassGraphs | None = None
        self._metadata: dict[int, dict[str, Any]] = {}
        self._ladder: tuple[int, ...] = ()
        self._inert_from: tuple[int, int] | None = None

    def capture(self, passes: PassGraphs, keys: DraftKeys, template: Any) -> None:
        """Capture a graph per request count; inert rows write no KV cache."""
        self.forget()
        proposer = self._owner
        if (reason := why_not(proposer, Part.V1_CHAIN)) is not None:
            self.stay_stock(reason)
            return
        max_reqs, device = proposer.vllm_config.scheduler_config.max_num_seqs, proposer.device
        self._passes, self._ladder = passes, keys.requests(STEP_QUERY_LEN)
        self._num_tokens = proposer.speculative_config.num_speculative_tokens

        def prepare() -> None:
            self._drafts = torch.zeros((max_reqs, self._num_tokens), dtype=torch.int64, device=device)
            self._sample_hidden = torch.zeros((max_reqs, proposer.hidden_size), dtype=proposer.dtype, device=device)
            self._inert = torch.zeros(max_reqs, dtype=torch.bool, device=device)
            self._captured = full_graphs(self._draft, proposer.vllm_config, passes.graph_pool)

        counts = reversed(self._ladder)
        records: list[Callable[[], None]] = [prepare, *(partial(self._record, count, template) for count in counts)]
        for record in records:
            if not self.attempt(record, passes.graph_pool):
                return
        steps = self._num_tokens - 1
        journal.note(DRAFT_LOOP_GRAPH, f"{steps} steps in one graph for {list(self._ladder)} requests")

    def _record(self, num_reqs: int, template: Any) -> None:
        self._metadata[num_reqs] = self._pass_graphs.dummy_metadata(_shape(num_reqs), template)
        self._mark_inert(0, num_reqs)
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
            self._launch(num_reqs, mode)

    @property
    def _pass_graphs(self) -> PassGraphs:
        assert self._passes is not None
        return self._passes

    @property
    def _buffers(self) -> PassBuffers:
        return self._pass_graphs.buffers.of(_shape(1))

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

        Args:
            sample_hidden_states: [batch, hidden] of the first pass, at each request's last accepted token.
            positions: int64 [batch], of the same tokens.
            hidden_states: [batch, hidden], what the next step reads.
            metadata: the `CommonAttentionMetadata` of the first pass; not changed.
            num_rejected_tokens: int32 [batch], to be subtracted from `metadata.seq_lens`.
            sampling_metadata: the target's; only greedy drafting is captured.

        Returns:
            int64 [batch, num_speculative_tokens], a new tensor.
        """
        proposer, batch = self._owner, metadata.num_reqs
        num_reqs = self._graph_for(metadata, sampling_metadata)
        if self._step_counts.missed(num_reqs):
            return None
        buffers = self._buffers
        buffers.write_seq_lens(metadata.seq_lens, num_reqs)
        if num_rejected_tokens is not None:
            buffers.seq_lens[:batch].sub_(num_rejected_tokens)
        self.prepare(batch, num_reqs)
        self._sample_hidden[:batch].copy_(sample_hidden_states)
        proposer.positions[:batch].copy_(positions)
        proposer.hidden_states[:batch].copy_(hidden_states)
        self._launch(num_reqs, CUDAGraphMode.FULL)
        return self._drafts[:batch].clone()

    def serves(self, num_reqs: int) -> bool:
        """Whether there is a chain of `num_reqs` requests."""
        return num_reqs in self._metadata

    def prepare(self, batch: int, num_reqs: int) -> None:
        """Make the chain's first `batch` requests real, and the rest inert."""
        self._buffers.write_even_starts(batch, num_reqs, STEP_QUERY_LEN)
        self._mark_inert(batch, num_reqs)

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
        proposer = self._owner
        self._buffers.seq_lens[:num_reqs].copy_(seq_lens)
        self._sample_hidden[:num_reqs].copy_(sample_hidden_states)
        proposer.positions[:num_reqs].copy_(positions)
        proposer.hidden_states[:num_reqs].copy_(hidden_states)
        with self._pass_graphs.forward_context(self._metadata[num_reqs], _shape(num_reqs), CUDAGraphMode.FULL):
            return self._chain(num_reqs, sample)

    def _graph_for(self, metadata: Any, sampling_metadata: Any) -> int | Reason:
        """Return the request count of this batch's graph, or the reason against."""
        proposer = self._owner
        if not self._metadata:
            return Reason.NOT_CAPTURED
        if proposer.num_speculative_tokens != self._num_tokens:
            return Reason.FEWER_DRAFTS
        if getattr(proposer, "_enable_probabilistic_draft_probs", False) and not sampling_metadata.all_greedy:
            return Reason.SAMPLING_PARAMETERS
        num_reqs = pad_up(self._ladder, metadata.num_reqs)
        if num_reqs is None:
            return Reason.LARGER_BATCH
        return num_reqs if self._draft_graphs.may_replay(metadata) else Reason.MOVED

    def _mark_inert(self, batch: int, num_reqs: int) -> None:
        if self._inert_from != (batch, num_reqs):
            self._inert[:batch].fill_(False)
            self._inert[batch:num_reqs].fill_(True)
            self._inert_from = (batch, num_reqs)

    def _launch(self, num_reqs: int, mode: CUDAGraphMode) -> None:
        assert self._captured is not None
        with self._pass_graphs.forward_context(self._metadata[num_reqs], _shape(num_reqs), mode):
            self._captured(num_reqs=num_reqs)

    def _draft(self, num_reqs: int) -> torch.Tensor:
        """Run the chain, captured. `CUDAGraphWrapper` wants a tensor back."""
        return self._chain(num_reqs, self._owner._greedy_sample)

    def _chain(self, num_reqs: int, sample: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run the chain in vLLM's order of operations; int64 [num_reqs, num_speculative_tokens]."""
        # It is captured, so every tensor here is persistent or the graph's own.
        proposer = self._owner
        slots = proposer._slot_mapping_buffer[:num_reqs]
        seq_lens = self._buffers.seq_lens[:num_reqs]
        block_table, inert = self._pass_graphs.buffers.block_table(num_reqs), self._inert[:num_reqs]
        positions, hidden = proposer.positions[:num_reqs], proposer.hidden_states[:num_reqs]
        inputs = {"input_ids": proposer.input_ids[:num_reqs], "positions": positions, "inputs_embeds": None}
        if proposer.pass_hidden_states_to_model:
            inputs["hidden_states"] = hidden
        tokens = sample(self._sample_hidden[:num_reqs])
        self._drafts[:num_reqs, 0].copy_(tokens)
        for step in range(1, self._num_tokens):
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
            if step + 1 < self._num_tokens:
                hidden.copy_(next_hidden)
            tokens = sample(last_hidden)
            self._drafts[:num_reqs, step].copy_(tokens)
        return self._drafts[:num_reqs]


def _shape(num_reqs: int) -> GraphShape:
    return uniform_shape(STEP_QUERY_LEN, num_reqs)
