"""vLLM's own `propose`, stock and patched, around a small draft model with exact integer arithmetic.

The proposers subclass the real `SpecDecodeBaseProposer`: everything between the inputs and the draft tokens is vLLM's
text, with the hunks or without. Only what needs a checkpoint, an attention backend or Triton is replaced.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import types
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

LAYER = "draft"
VOCAB, HIDDEN, PRIME = 211, 4, 1009
BLOCK, BLOCKS, MAX_LEN = 4, 16, 64
MAX_REQS, MAX_TOKENS = 9, 128
FIELDS = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}


def plain_eagle_step(
    positions_1d,
    block_table_tensor,
    seq_lens,
    block_size,
    max_model_len,
    out_clamped_positions,
    out_slot_mapping,
    input_batch_size=None,
):
    """The Triton kernel's arithmetic in torch, so that it can be recorded on any device."""
    batch = positions_1d.shape[0]
    moved = positions_1d + 1
    beyond = moved >= max_model_len
    clamped = torch.where(beyond, torch.zeros_like(moved), moved)
    columns = (clamped // block_size).clamp(max=block_table_tensor.shape[1] - 1)
    blocks = block_table_tensor[:batch].gather(1, columns[:, None])[:, 0].long()
    slots = torch.where(beyond, PADDING_SLOT_ID, blocks * block_size + clamped % block_size)
    lengths = torch.where(beyond, torch.ones_like(seq_lens), seq_lens + 1).clamp(max=max_model_len)
    out_clamped_positions.copy_(clamped)
    out_slot_mapping[:batch].copy_(slots)
    out_slot_mapping[batch : input_batch_size or batch].fill_(PADDING_SLOT_ID)
    seq_lens.copy_(lengths)


class DraftModel:
    """Hashes token, position, the request's cached keys and its length, so that any stale input changes the tokens."""

    def __init__(self, returns_tuple: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randint(PRIME, (VOCAB, HIDDEN), generator=generator)
        self.head = torch.randint(PRIME, (HIDDEN, VOCAB), generator=generator)
        # The last row takes what padding slots write.
        self.cache = torch.zeros(MAX_REQS * BLOCKS * BLOCK + 1, HIDDEN, dtype=torch.int64)
        self.returns_tuple = returns_tuple

    def __call__(self, input_ids, positions, inputs_embeds=None, hidden_states=None):
        context = get_forward_context()
        metadata, slots = context.attn_metadata[LAYER], context.slot_mapping[LAYER]
        starts, lengths = metadata.query_start_loc.long(), metadata.seq_lens.long()
        count = input_ids.shape[0]
        keys = self.embedding[input_ids] * 31 + positions[:, None] * 17 + 7
        if hidden_states is not None:
            keys = keys + hidden_states * 13
        keys = keys % PRIME
        self.cache.index_put_((torch.where(slots < 0, self.cache.shape[0] - 1, slots),), keys)
        tokens = torch.arange(count)
        rows = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=starts.shape[0] - 2)
        last = lengths[rows] - (starts[rows + 1] - tokens)
        past = torch.arange(MAX_LEN)
        seen = self.cache[metadata.block_table[rows][:, past // BLOCK].long() * BLOCK + past % BLOCK]
        visible = (past[None] <= last[:, None]) & (past[None] < lengths[rows][:, None])
        attended = (seen * (past[None, :, None] + 1) * visible[..., None]).sum(1) % PRIME
        output = (keys * 5 + attended * 3 + lengths[rows][:, None] * 11) % PRIME
        return (output, (output * 7 + 1) % PRIME) if self.returns_tuple else output

    def compute_logits(self, hidden_states):
        return (hidden_states[:, :, None] * self.head).sum(1) % PRIME


@dataclass
class Views:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


def build_views(common_attn_metadata, draft_index: int) -> Views:
    """What the model reads of the metadata: views, as FLASH_ATTN's builder makes them for drafting."""
    return Views(
        common_attn_metadata.query_start_loc, common_attn_metadata.seq_lens, common_attn_metadata.block_table_tensor
    )


def make_config(sizes: list[int]) -> VllmConfig:
    config = VllmConfig()
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    config.scheduler_config.max_num_seqs = MAX_REQS
    config.model_config = types.SimpleNamespace(uses_mrope=False)
    return config


def set_up(proposer: Any, config: VllmConfig, k: int, model: DraftModel, queries: int = MAX_TOKENS) -> None:
    """Give a proposer what vLLM's constructors do, around a model that has no weights.

    Args:
        queries: how many tokens the draft model gets at most.
    """
    masks = proposer.method == "dflash"
    proposer.vllm_config, proposer.device, proposer.model = config, torch.device("cpu"), model
    proposer.speculative_config = types.SimpleNamespace(
        num_speculative_tokens=k,
        enforce_eager=False,
        disable_padded_drafter_batch=False,
        method=proposer.method,
        use_dflash=lambda: masks,
        use_eagle=lambda: True,
        uses_draft_model=lambda: False,
        uses_extract_hidden_states=lambda: False,
    )
    proposer.num_speculative_tokens = k
    proposer.pass_hidden_states_to_model = True
    proposer.parallel_drafting = proposer.needs_extra_input_slots = masks
    proposer.extra_slots_per_request, proposer.net_num_new_slots_per_request = 1, k if masks else 0
    proposer.dtype, proposer.hidden_size = torch.int64, HIDDEN
    proposer.draft_model_config = types.SimpleNamespace(get_hidden_size=lambda: HIDDEN)
    proposer.max_model_len, proposer.block_size = MAX_LEN, BLOCK
    proposer.max_num_tokens, proposer.max_positions = MAX_TOKENS, MAX_TOKENS + masks * queries
    proposer.supports_mm_inputs = proposer.uses_mrope = proposer.constant_draft_positions = False
    proposer.use_heterogeneous_vocab = proposer.use_local_argmax_reduction = False
    proposer._enable_probabilistic_draft_probs = proposer._share_mtp_indices = False
    proposer.uses_xdrope_dim = proposer.draft_uses_xdrope_dim = 0
    proposer.allowed_attn_types = proposer.eplb_state = None
    proposer.input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    proposer.positions = torch.zeros(queries, dtype=torch.int64)
    proposer._slot_mapping_buffer = torch.zeros(queries, dtype=torch.int64)
    proposer.hidden_states = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.int64)
    proposer.arange = torch.arange(proposer.max_positions + masks, dtype=torch.int32)
    proposer.token_arange_np = proposer.arange.numpy().copy()
    proposer._draft_attn_layer_names = {LAYER}
    proposer.draft_attn_groups = []
    proposer.cudagraph_dispatcher = CudagraphDispatcher(config)


def add_graphs(proposer: Any, module: types.ModuleType) -> None:
    """Add what the hunks add to `SpecDecodeBaseProposer.__init__`."""
    if hasattr(module, "DraftGraphs"):
        proposer.draft_graphs = module.DraftGraphs(proposer)
    if hasattr(module, "DraftLoop"):
        proposer.draft_loop = proposer.draft_graphs.add(module.DraftLoop)


def make_proposer(module: types.ModuleType, k: int, config: VllmConfig):
    """An EAGLE proposer of `module` (vLLM's, or its patched text) without weights."""

    class EagleProposer(module.SpecDecodeBaseProposer):
        def __init__(self):
            self.method = "eagle"
            set_up(self, config, k, DraftModel(self.model_returns_tuple()))
            add_graphs(self, module)

    return EagleProposer()


class Runner:
    """The model runner's side: a block table at a fixed address, batches, rejections."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.table = torch.zeros(MAX_REQS, BLOCKS, dtype=torch.int32)
        self.requests = torch.randperm(MAX_REQS * BLOCKS, generator=self.generator).view(MAX_REQS, BLOCKS).int()

    def template(self, num_reqs: int = 1) -> CommonAttentionMetadata:
        """What the runner's dummy batch gives for capture."""
        return self.metadata([1] * num_reqs, [1] * num_reqs)

    def metadata(self, lengths: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        sequence = torch.tensor(seq_lens, dtype=torch.int32)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = sequence[rows] - (starts[rows + 1] - torch.arange(len(rows)))
        blocks = self.table[rows, positions // BLOCK].long()
        values = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": sequence,
            "_seq_lens_cpu": sequence.clone(),
            "_num_computed_tokens_cpu": sequence - torch.tensor(lengths, dtype=torch.int32),
            "seq_lens_cpu_upper_bound": sequence.clone(),
            "is_prefilling": torch.tensor([length == seq for length, seq in zip(lengths, seq_lens, strict=True)]),
            "positions": positions.long(),
            "num_reqs": len(lengths),
            "num_actual_tokens": len(rows),
            "max_query_len": max(lengths),
            "max_seq_len": max(seq_lens),
            "block_table_tensor": self.table[: len(lengths)],
            "slot_mapping": blocks * BLOCK + positions % BLOCK,
        }
        return CommonAttentionMetadata(**{name: value for name, value in values.items() if name in FIELDS})

    def batch(
        self, k: int, kind: str = "decode", size: int | None = None, lengths: list[int] | None = None
    ) -> dict[str, Any]:
        """Arguments of `propose` for one random batch: "decode" (1 + k tokens each), "mixed", or "prefill"; or of these
        lengths."""
        size = len(lengths) if lengths is not None else size or self.random.randint(1, MAX_REQS)
        chosen = self.random.sample(range(MAX_REQS), size)
        self.table[:size].copy_(self.requests[chosen])
        if lengths is None:
            lengths = [1 + k if kind == "decode" else self.random.randint(1, 7) for _ in range(size)]
        # Every so often a request stands at the length limit, where vLLM's step kernel wraps around.
        seq_lens = [
            length if kind == "prefill" else self.random.choice([self.random.randint(length, MAX_LEN), MAX_LEN])
            for length in lengths
        ]
        metadata = self.metadata(lengths, seq_lens)
        count, positions = metadata.num_actual_tokens, []
        for length, seq in zip(lengths, seq_lens, strict=True):
            positions += range(seq - length, seq)
        rejected = [0 if kind == "prefill" else self.random.randint(0, length - 1) for length in lengths]
        return {
            "num_speculative_tokens": k,
            "target_token_ids": torch.randint(VOCAB, (count,), generator=self.generator).int(),
            "target_positions": torch.tensor(positions),
            "target_hidden_states": torch.randint(PRIME, (count, HIDDEN), generator=self.generator),
            "next_token_ids": torch.randint(VOCAB, (size,), generator=self.generator).int(),
            "token_indices_to_sample": metadata.query_start_loc[1:] - 1 - torch.tensor(rejected, dtype=torch.int32),
            "common_attn_metadata": metadata,
            "sampling_metadata": types.SimpleNamespace(all_greedy=True),
            "num_rejected_tokens_gpu": None if kind == "prefill" else torch.tensor(rejected, dtype=torch.int32),
        }


def clone_metadata(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A copy that `propose` may write into; the block table stays where the runner has it."""
    changes = {
        name: value.clone()
        for name in FIELDS - {"block_table_tensor"}
        if isinstance(value := getattr(metadata, name), torch.Tensor)
    }
    return dataclasses.replace(metadata, **changes)


def propose(proposer, batch: dict[str, Any]) -> torch.Tensor:
    accepted = inspect.signature(proposer.propose).parameters
    arguments = {name: value for name, value in batch.items() if name in accepted}
    return proposer.propose(**arguments | {"common_attn_metadata": clone_metadata(batch["common_attn_metadata"])})


def compare(stock, graphed, batch):
    """Both propose for one batch; returns the drafts, which are the same."""
    for proposer in (stock, graphed):
        # vLLM leaves a rejected last token's id as an earlier batch had it, and what is drafted never depends on it.
        proposer.input_ids[len(batch["target_token_ids"]) - 1] = 0
    expected, got = propose(stock, batch), propose(graphed, batch)
    assert got.tolist() == expected.tolist()
    # All but the row for padding slots: padded rows wrote nowhere, and every real row wrote where stock did.
    assert torch.equal(graphed.model.cache[:-1], stock.model.cache[:-1])
    return got


def compare_over_many(runner: Runner, k: int, compare_one) -> None:
    """Compare over batches of every kind and size, and see that they were varied enough to mean something."""
    sizes, tokens = set(), set()
    for index in range(36):
        kind_of_batch = "prefill" if index % 9 == 0 else "mixed" if index % 9 == 4 else "decode"
        batch = runner.batch(k, kind_of_batch, size=1 + index % MAX_REQS if index < MAX_REQS else None)
        drafts = compare_one(batch)
        assert drafts.shape == (batch["common_attn_metadata"].num_reqs, k)
        sizes.add(len(drafts))
        tokens.update(drafts.flatten().tolist())
    assert sizes == set(range(1, MAX_REQS + 1))
    assert len(tokens) > 30


def boot(proposer, mode: CUDAGraphMode, runner: Runner, **how: Any) -> None:
    """Start `proposer` as vLLM's runner does; see `host_runner` for `how`."""
    proposer.host.start(mode, runner.template(), **how)
