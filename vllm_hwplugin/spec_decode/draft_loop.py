# SPDX-License-Identifier: Apache-2.0
"""The drafter's whole chain of one-token steps in one CUDA graph.

`draft_graphs` makes each pass one launch, but between passes the host still samples, advances positions and sequence
lengths, builds metadata and copies inputs: some ten launches a step. Where the draft attention backend's metadata is
nothing but views of buffers that the chain itself advances, all of that can be captured too: one launch then takes the
first pass's hidden states to all k draft tokens.

It applies to greedy drafting, which is vLLM's default. Batches that it does not cover (sampled drafts, another number
of draft tokens than the configured one) take the path of `draft_graphs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID, eagle_step_update_slot_mapping_and_metadata

from vllm_hwplugin import record
from vllm_hwplugin.spec_decode.draft_builders import builder_classes, refusing
from vllm_hwplugin.spec_decode.draft_graphs import DraftGraphs, full_graphs
from vllm_hwplugin.spec_decode.draft_keys import pad_up, uniform_shape
from vllm_hwplugin.spec_decode.fallback import stays_stock

_FEATURE = "draft-loop-graph"
_GATE = "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH"


@dataclass(frozen=True)
class ChainFacts:
    """What decides whether a drafter's chain may be one graph; plain values, so that the decision needs no device.

    `attention` is why the draft layers' attention backends do not allow it, or None.
    """

    num_speculative_tokens: int
    attention: str | None = None
    parallel_drafting: bool = False
    expanded_hidden_states: bool = False
    host_side: tuple[str, ...] = ()


def obstacle(facts: ChainFacts) -> str | None:
    """Why this drafter's steps are launched one by one, or None."""
    if facts.num_speculative_tokens < 2 or facts.parallel_drafting:
        return "one pass drafts every token, so there is no chain"
    if facts.attention is not None:
        return f"metadata has to be built between steps ({facts.attention})"
    if facts.expanded_hidden_states:
        return "the states that the draft model passes on are wider than those it samples from"
    if facts.host_side:
        return f"the drafter does host work between steps: {', '.join(facts.host_side)}"
    return None


class DraftLoop:
    """The chain graphs of one `SpecDecodeBaseProposer`, which holds it as `draft_loop`."""

    def __init__(self, proposer: Any):
        self._proposer = proposer
        self._num_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Have no chain graphs, and nothing that was made for them."""
        self._graphs: CUDAGraphWrapper | None = None
        self._metadata: dict[int, dict[str, Any]] = {}
        self._ladder: tuple[int, ...] = ()
        self._inert_from: tuple[int, int] | None = None

    @property
    def _owner(self) -> DraftGraphs:
        return self._proposer.draft_graphs  # type: ignore[no-any-return]

    def capture(self, ladder: tuple[int, ...], graph_pool: Any, template: Any) -> None:
        """Capture a graph for each request count of `ladder`, largest first, in the drafter's memory pool.

        The rows are inert, so nothing is written to the KV cache.
        """
        self.forget()
        reason = obstacle(self._facts())
        if reason is not None:
            self.leave(reason)
            return
        proposer = self._proposer
        max_reqs, device = proposer.vllm_config.scheduler_config.max_num_seqs, proposer.device
        self._ladder, self._num_tokens = ladder, proposer.speculative_config.num_speculative_tokens
        self._drafts = torch.zeros((max_reqs, self._num_tokens), dtype=torch.int64, device=device)
        self._sample_hidden = torch.zeros((max_reqs, proposer.hidden_size), dtype=proposer.dtype, device=device)
        self._inert = torch.zeros(max_reqs, dtype=torch.bool, device=device)
        self._graphs = full_graphs(self._draft, proposer.vllm_config, graph_pool)
        for num_reqs in reversed(ladder):
            self._metadata[num_reqs] = self._owner.capture_metadata(template, uniform_shape(1, num_reqs))
            self._mark_inert(0, num_reqs)
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                self._launch(num_reqs, mode)
        record.note(_FEATURE, f"{self._num_tokens - 1} steps in one graph for {list(ladder)} requests")

    def leave(self, reason: str) -> None:
        """Have no chain graphs, for `reason`."""
        self.forget()
        stays_stock(_FEATURE, _GATE, "steps are launched one by one", reason)

    def _facts(self) -> ChainFacts:
        proposer = self._proposer
        names = (
            "supports_mm_inputs",
            "uses_mrope",
            "draft_uses_xdrope_dim",
            "constant_draft_positions",
            "use_heterogeneous_vocab",
            "use_local_argmax_reduction",
            "allowed_attn_types",
            "eplb_state",
        )
        return ChainFacts(
            num_speculative_tokens=proposer.speculative_config.num_speculative_tokens,
            attention=refusing(builder_classes(proposer), "chain"),
            parallel_drafting=proposer.parallel_drafting,
            # DeepSeek V4's MTP passes several residual streams on, side by side.
            expanded_hidden_states=proposer.hidden_size != proposer.draft_model_config.get_hidden_size(),
            host_side=tuple(name for name in names if getattr(proposer, name, None)),
        )

    def run(
        self,
        sample_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: Any,
        num_rejected_tokens: torch.Tensor | None,
        sampling_metadata: Any,
    ) -> torch.Tensor | None:
        """Draft every token of the batch in one launch, or None where this batch has no such graph.

        Args:
            sample_hidden_states: [batch, hidden] of the first pass, at each request's last accepted token.
            positions: int64 [batch], of those tokens.
            hidden_states: [batch, hidden], what the next step reads.
            metadata: the `CommonAttentionMetadata` of the first pass; not changed.
            num_rejected_tokens: int32 [batch], to be taken off `metadata.seq_lens`.
            sampling_metadata: the target's; only greedy drafting is captured.

        Returns:
            int64 [batch, num_speculative_tokens], a tensor of its own.
        """
        proposer, batch = self._proposer, metadata.num_reqs
        num_reqs = pad_up(self._ladder, batch)
        if num_reqs is None or num_reqs not in self._metadata or not self._covers(metadata, sampling_metadata):
            return None
        buffers = self._owner.step_buffers
        buffers.write(metadata, uniform_shape(1, num_reqs))
        if num_rejected_tokens is not None:
            buffers.seq_lens[:batch].sub_(num_rejected_tokens)
        self._mark_inert(batch, num_reqs)
        self._sample_hidden[:batch].copy_(sample_hidden_states)
        proposer.positions[:batch].copy_(positions)
        proposer.hidden_states[:batch].copy_(hidden_states)
        self._launch(num_reqs, CUDAGraphMode.FULL)
        return self._drafts[:batch].clone()

    def _covers(self, metadata: Any, sampling_metadata: Any) -> bool:
        proposer = self._proposer
        if proposer.num_speculative_tokens != self._num_tokens:
            return False
        if getattr(proposer, "_enable_probabilistic_draft_probs", False) and not sampling_metadata.all_greedy:
            return False
        return self._owner.may_replay(metadata)

    def _mark_inert(self, batch: int, num_reqs: int) -> None:
        if self._inert_from != (batch, num_reqs):
            self._inert[:batch].fill_(False)
            self._inert[batch:num_reqs].fill_(True)
            self._inert_from = (batch, num_reqs)

    def _launch(self, num_reqs: int, mode: CUDAGraphMode) -> None:
        assert self._graphs is not None
        with self._owner.forward_context(self._metadata[num_reqs], uniform_shape(1, num_reqs), mode):
            self._graphs(num_reqs=num_reqs)

    def _draft(self, num_reqs: int) -> torch.Tensor:
        """The chain, in vLLM's order of operations; captured, so every tensor here is persistent or the graph's own.

        `CUDAGraphWrapper` wants tensors back, so it returns the drafts, int64 [num_reqs, num_speculative_tokens].
        """
        proposer = self._proposer
        slots = proposer._slot_mapping_buffer[:num_reqs]
        seq_lens = self._owner.step_buffers.seq_lens[:num_reqs]
        inert = self._inert[:num_reqs]
        positions, hidden = proposer.positions[:num_reqs], proposer.hidden_states[:num_reqs]
        inputs = {"input_ids": proposer.input_ids[:num_reqs], "positions": positions, "inputs_embeds": None}
        if proposer.pass_hidden_states_to_model:
            inputs["hidden_states"] = hidden
        tokens = proposer._greedy_sample(self._sample_hidden[:num_reqs])
        self._drafts[:num_reqs, 0].copy_(tokens)
        for step in range(1, self._num_tokens):
            eagle_step_update_slot_mapping_and_metadata(
                positions_1d=positions,
                block_table_tensor=self._owner.block_table(num_reqs),
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
            tokens = proposer._greedy_sample(last_hidden)
            self._drafts[:num_reqs, step].copy_(tokens)
        return self._drafts[:num_reqs]
