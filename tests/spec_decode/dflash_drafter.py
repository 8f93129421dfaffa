"""vLLM's own `DFlashProposer`, stock and patched, around a small draft model with exact integer arithmetic."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from .drafters import BLOCK, HIDDEN, LAYER, MAX_LEN, MAX_REQS, MAX_TOKENS, PRIME, VOCAB, DraftModel, Views


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
            self.vllm_config, self.method, self.device = config, "dflash", torch.device("cpu")
            self.compilation_config = config.compilation_config
            self.speculative_config = types.SimpleNamespace(
                num_speculative_tokens=k,
                enforce_eager=False,
                disable_padded_drafter_batch=False,
                method="dflash",
                use_dflash=lambda: True,
                use_eagle=lambda: True,
                uses_draft_model=lambda: False,
                uses_extract_hidden_states=lambda: False,
            )
            self.num_speculative_tokens = k
            self.pass_hidden_states_to_model = self.parallel_drafting = True
            self.net_num_new_slots_per_request = k
            self.needs_extra_input_slots = True
            self.parallel_drafting_token_id, self.dflash_causal = VOCAB - 1, False
            self.dtype, self.hidden_size = torch.int64, HIDDEN
            self.draft_model_config = types.SimpleNamespace(get_hidden_size=lambda: HIDDEN)
            self.max_model_len, self.block_size, self.max_num_tokens = MAX_LEN, BLOCK, MAX_TOKENS
            self.max_query_tokens = MAX_REQS * (1 + k)
            self.max_positions = MAX_TOKENS + self.max_query_tokens
            self.supports_mm_inputs = self.uses_mrope = self.constant_draft_positions = False
            self.use_heterogeneous_vocab = self.use_local_argmax_reduction = False
            self._enable_probabilistic_draft_probs = self._share_mtp_indices = False
            self.uses_xdrope_dim = self.draft_uses_xdrope_dim = 0
            self.allowed_attn_types = self.eplb_state = None
            self.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
            self.positions = torch.zeros(self.max_query_tokens, dtype=torch.int64)
            self._slot_mapping_buffer = torch.zeros(self.max_query_tokens, dtype=torch.int64)
            self._context_positions_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
            self._context_slot_mapping_buffer = torch.zeros(MAX_TOKENS, dtype=torch.int64)
            self.hidden_states = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.int64)
            self.arange = torch.arange(self.max_positions + 1, dtype=torch.int32)
            self.token_arange_np = self.arange.numpy().copy()
            self._draft_attn_layer_names = {LAYER}
            self.draft_attn_groups = []
            self.model = DFlashModel()
            # What the hunks add to the constructors.
            self.cudagraph_dispatcher = CudagraphDispatcher(config)
            if hasattr(modules.proposer, "DraftGraphs"):
                self.draft_graphs = modules.proposer.DraftGraphs(self)
                self.draft_loop = self.draft_graphs.add(modules.proposer.DraftLoop)
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
