"""vLLM's own `DFlashProposer`, stock and patched, around a small draft model with exact integer arithmetic."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from .drafters import (
    BLOCK,
    LAYER,
    MAX_LEN,
    MAX_REQS,
    MAX_TOKENS,
    PRIME,
    VOCAB,
    DraftModel,
    Views,
    add_graphs,
    set_up,
)


class DFlashModel(DraftModel):
    """Hashes a query with all that its block may see, context and later queries too."""

    def __init__(self) -> None:
        super().__init__(returns_tuple=False)

    def combine_hidden_states(self, states):
        return states * 3 % PRIME

    def precompute_and_store_context_kv(self, states, positions, slots=None):
        keys = (states * 23 + positions[:, None] * 17 + 5) % PRIME
        if slots is not None:
            self.cache.index_put_((torch.where(slots < 0, self.cache.shape[0] - 1, slots),), keys)

    def __call__(self, input_ids, positions, inputs_embeds=None):
        context = get_forward_context()
        metadata, slots = context.attn_metadata[LAYER], context.slot_mapping[LAYER]
        assert metadata.causal is False
        starts, lengths = metadata.query_start_loc.long(), metadata.seq_lens.long()
        keys = (self.embedding[input_ids] * 31 + positions[:, None] * 19 + 7) % PRIME
        self.cache.index_put_((torch.where(slots < 0, self.cache.shape[0] - 1, slots),), keys)
        tokens = torch.arange(input_ids.shape[0])
        rows = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=starts.shape[0] - 2)
        past = torch.arange(MAX_LEN)
        seen = self.cache[metadata.block_table[rows][:, past // BLOCK].long() * BLOCK + past % BLOCK]
        visible = past[None] < lengths[rows][:, None]
        attended = (seen * (past[None, :, None] + 1) * visible[..., None]).sum(1) % PRIME
        return (keys * 5 + attended * 3 + lengths[rows][:, None] * 11) % PRIME


@dataclasses.dataclass
class BlockViews(Views):
    causal: bool


def plain_expand(**given: Any) -> None:
    """vLLM's Triton kernel `copy_and_expand_dflash_inputs` in torch, so that it can be recorded on any device."""
    starts, width, count = given["query_start_loc_ptr"].long(), given["num_query_per_req"], given["total_input_tokens"]
    table, size, context = given["block_table_ptr"], given["block_size"], given["target_positions_ptr"][:count]
    num_reqs = starts.shape[0] - 1
    rejected = given["num_rejected_tokens_ptr"] if given["has_num_rejected"] else 0
    rows = torch.searchsorted(starts[1:], torch.arange(count), right=True)
    queries = context[starts[1:] - rejected - 1][:, None] + torch.arange(1, width + 1)
    for kind, owners, positions in (
        ("context", rows, context),
        ("query", torch.arange(num_reqs).repeat_interleave(width), queries.flatten()),
    ):
        blocks = table[owners, (positions // size).clamp(max=table.shape[1] - 1)].long()
        given[f"out_{kind}_positions_ptr"][: len(positions)].copy_(positions)
        given[f"out_{kind}_slot_mapping_ptr"][: len(positions)].copy_(blocks * size + positions % size)
    tokens = torch.full((num_reqs, width), given["parallel_drafting_token_id"], dtype=torch.int32)
    tokens[:, 0] = given["next_token_ids_ptr"]
    given["out_input_ids_ptr"][: num_reqs * width].copy_(tokens.flatten())
    sampled = torch.arange(num_reqs)[:, None] * width + torch.arange(1, width)
    given["out_token_indices_ptr"].copy_(sampled.flatten())


@dataclasses.dataclass(frozen=True)
class Modules:
    """vLLM's modules, or their patched texts."""

    dflash: types.ModuleType
    proposer: types.ModuleType


def make_dflash(modules: Modules, k: int, config: Any):
    """A `DFlashProposer` without weights."""
    module = modules.dflash

    class DFlashProposer(module.DFlashProposer):
        def __init__(self):
            self.method, self.compilation_config = "dflash", config.compilation_config
            self.max_query_tokens = MAX_REQS * (1 + k)
            self.parallel_drafting_token_id, self.dflash_causal = VOCAB - 1, False
            self._context_positions_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
            self._context_slot_mapping_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
            set_up(self, config, k, DFlashModel(), self.max_query_tokens)
            add_graphs(self, modules.proposer)
            # What the hunks add to the constructor.
            if hasattr(module, "ContextGraphs"):
                module.lengthen_query_buffers(self)
                self.draft_context = self.draft_graphs.add(module.ContextGraphs)

    return DFlashProposer()


def build_block_views(common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> BlockViews:
    return BlockViews(
        common_attn_metadata.query_start_loc,
        common_attn_metadata.seq_lens,
        common_attn_metadata.block_table_tensor,
        common_attn_metadata.causal,
    )
