# SPDX-License-Identifier: Apache-2.0
"""Metadata of layers with a gated delta rule, with the shapes of a graph: the batch is the one of vLLM's metadata."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.spec_decode.v2 import mixed_graphs
from vllm_hwplugin.spec_decode.v2.delta_rule import MOST_PROMPTS, FixedMetadata, attach, most_requests

from ...musa_sim.delta_rule import check_chunks

DRAFTS, TOKENS, REQUESTS = 3, 320, 12
CPU = torch.device("cpu")


@dataclass
class Row:
    """A request of a batch.

    Attributes:
        tokens: that the step computes.
        computed: tokens before them.
        drafts: to be verified; -1 in a prompt.
    """

    tokens: int
    computed: int
    drafts: int


def builder() -> Any:
    """vLLM's, with as much as its builds read."""
    made = object.__new__(GDNAttentionMetadataBuilder)
    cache = SimpleNamespace(mamba_cache_mode="none")
    vars(made).update(
        num_spec=DRAFTS,
        use_spec_decode=True,
        device=CPU,
        kv_cache_spec=None,
        vllm_config=SimpleNamespace(cache_config=cache),
        gdn_prefill_backend="triton",
        checkpoint_builder=SimpleNamespace(build=lambda *_: None),
        plan_flashinfer_checkpoints=False,
        use_full_cuda_graph=False,
        reorder_batch_threshold=1,
    )
    return made


def batch_of(rows: Sequence[Row], seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a batch that is padded to a graph's size, and what vLLM's builder also gets."""
    lengths = torch.tensor([row.tokens for row in rows] + [0] * (REQUESTS - len(rows)), dtype=torch.int32)
    computed = torch.tensor([row.computed for row in rows] + [0] * (REQUESTS - len(rows)), dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    random_numbers = torch.Generator().manual_seed(seed)
    table = torch.randperm(REQUESTS * (1 + DRAFTS), generator=random_numbers).int().view(REQUESTS, -1) + 1
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths + computed,
        seq_lens_cpu_upper_bound=lengths + computed,
        max_seq_len=1024,
        num_reqs=REQUESTS,
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        block_table_tensor=table,
        slot_mapping=torch.zeros(TOKENS, dtype=torch.long),
        is_prefilling=torch.tensor([row.drafts < 0 for row in rows] + [False] * (REQUESTS - len(rows))),
    )
    drafts = torch.tensor([row.drafts for row in rows] + [-1] * (REQUESTS - len(rows)), dtype=torch.int32)
    accepted = torch.randint(1, 2 + DRAFTS, (REQUESTS,), generator=random_numbers).int()
    return common, {"num_accepted_tokens": accepted, "num_decode_draft_tokens_cpu": drafts}


def decodes_of(metadata: Any) -> list[Any]:
    """Return tokens, states and accepted tokens of each request that verifies drafts."""
    if metadata.spec_sequence_masks is None:
        return []
    tokens, states = metadata.spec_token_indx.tolist(), metadata.spec_state_indices_tensor.tolist()
    parts = enumerate(pairwise(metadata.spec_query_start_loc.tolist()))
    return [(tokens[start:end], states[at], int(metadata.num_accepted_tokens[at])) for at, (start, end) in parts
            if start < end]  # fmt: skip


def prompts_of(metadata: Any) -> list[Any]:
    """Return tokens, state, and whether there is one before, of each request with other tokens."""
    if metadata.non_spec_query_start_loc is None:
        return []
    bounds = metadata.non_spec_query_start_loc.tolist()
    tokens = range(TOKENS) if metadata.non_spec_token_indx is None else metadata.non_spec_token_indx.tolist()
    states, before = metadata.non_spec_state_indices_tensor.tolist(), metadata.has_initial_state.tolist()
    parts = enumerate(pairwise(bounds))
    return [(list(tokens[start:end]), states[at], before[at]) for at, (start, end) in parts if start < end]


def rows_by_chance(chosen: random.Random) -> list[Row]:
    """A batch of each kind: also only prompts, and only decodes."""
    decodes = [Row(1 + drafts, 50, drafts) for drafts in chosen.choices(range(DRAFTS + 1), k=chosen.randrange(5))]
    lengths = chosen.choices((1, 7, 8, 9, 63, 64, 65, 130), k=chosen.randrange(not decodes, 4))
    prompts = [Row(length, chosen.choice((0, 0, 70)), -1) for length in lengths]
    while sum(row.tokens for row in (*decodes, *prompts)) >= TOKENS:
        prompts.pop()
    rows = [*decodes, *prompts]
    chosen.shuffle(rows)
    return rows


@pytest.fixture(name="attached")
def _attached(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    made = builder()
    replays = [True]
    attach(made, 2 * TOKENS, 2 * REQUESTS, lambda: replays[0])
    return made, replays


@pytest.mark.parametrize("seed", range(40))
def test_it_has_the_requests_of_vllms(attached: Any, seed: int) -> None:
    rows = rows_by_chance(random.Random(seed))
    common, more = batch_of(rows, seed)
    fixed = attached[0].build(0, common, **more)
    vllms = builder().build(0, common, **more)
    assert isinstance(fixed, FixedMetadata)
    assert decodes_of(fixed) == decodes_of(vllms)
    prompts = [row for row in rows if row.drafts < 0]
    if prompts and not all(row.tokens == 1 for row in prompts):
        assert prompts_of(fixed) == prompts_of(vllms)
    assert sum(len(one[0]) for one in (*decodes_of(fixed), *prompts_of(fixed))) == sum(row.tokens for row in rows)
    bounds = fixed.prefill_query_start_loc.tolist()
    check_chunks(bounds, fixed.chunk_indices.tolist(), fixed.chunk_offsets.tolist())
    blocks = zip(fixed.batch_ptr.tolist(), fixed.token_chunk_offset_ptr.tolist(), strict=True)
    expected = [(at, block) for at, row in enumerate(prompts) for block in range(-(-row.tokens // 8))]
    assert [one for one in blocks if one[0] != PAD_SLOT_ID] == expected


def test_its_tensors_stay_where_they_are_and_padding_is_of_no_request(attached: Any) -> None:
    places = set()
    for seed in range(20):
        rows = rows_by_chance(random.Random(seed))
        common, more = batch_of(rows, seed)
        fixed = attached[0].build(0, common, **more)
        tensors = {name: value for name, value in vars(fixed).items() if isinstance(value, torch.Tensor)}
        places.add(tuple((name, one.data_ptr(), one.shape, one.stride()) for name, one in sorted(tensors.items())))
        decodes = sum(row.drafts >= 0 for row in rows)
        of_decodes = sum(row.tokens for row in rows if row.drafts >= 0)
        prompts = len(rows) - decodes
        assert (fixed.spec_state_indices_tensor[decodes:] == NULL_BLOCK_ID).all()
        assert (fixed.num_accepted_tokens[decodes:] == 1).all()
        assert (fixed.prefill_state_indices[prompts:] == NULL_BLOCK_ID).all()
        assert not fixed.has_initial_state[prompts:].any()
        # No batch has the last row.
        assert (fixed.spec_token_indx[of_decodes:] == TOKENS - 1).all()
        assert (fixed.non_spec_token_indx[sum(row.tokens for row in rows) - of_decodes :] == TOKENS - 1).all()
        assert len(fixed.spec_token_indx) == REQUESTS * (1 + DRAFTS)
        assert fixed.nums_dict[8]["tot"] == len(fixed.batch_ptr)
    assert len(places) == 1


def test_a_graph_is_captured_without_requests_and_decode_batches_are_vllms(attached: Any) -> None:
    made, replays = attached
    common, more = batch_of([Row(1, 5, 0), Row(9, 0, -1)], 0)
    captured = made.build_for_cudagraph_capture(common)
    assert isinstance(captured, FixedMetadata)
    assert (decodes_of(captured), prompts_of(captured)) == ([], [])
    replays[0] = False
    assert not isinstance(made.build(0, common, **more), FixedMetadata)
    vllms = builder()
    calls: list[Any] = []
    vllms.build_for_cudagraph_capture = calls.append
    attach(vllms, TOKENS, REQUESTS, lambda: True)
    decode = common.replace(max_query_len=1 + DRAFTS)
    vllms.build_for_cudagraph_capture(decode)
    assert calls == [decode]


def test_another_group_has_its_own_states(attached: Any) -> None:
    common, more = batch_of([Row(2, 5, 1), Row(9, 0, -1)], 0)
    fixed = attached[0].build(0, common, **more)
    other = builder()
    attach(other, TOKENS, REQUESTS, lambda: True)
    table = common.block_table_tensor + 100
    shared = other.update_block_table(fixed, table, common.slot_mapping)
    assert shared.spec_state_indices_tensor[0].tolist() == table[0].tolist()
    assert shared.prefill_state_indices.tolist() == [int(table[1, 0]), *[NULL_BLOCK_ID] * MOST_PROMPTS]
    assert fixed.spec_state_indices_tensor[0].tolist() == common.block_table_tensor[0].tolist()
    assert shared.spec_token_indx.data_ptr() == fixed.spec_token_indx.data_ptr()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Row(2, 0, -1)] * (MOST_PROMPTS + 1), "9 prompts in a graph for 8"),
        ([Row(TOKENS, 0, -1)], "320 tokens fills the graph"),
    ],
)
def test_a_batch_that_the_dispatch_has_to_keep_out_is_an_error(attached: Any, rows: list[Row], said: str) -> None:
    common, more = batch_of(rows, 0)
    with pytest.raises(AssertionError, match=said):
        attached[0].build(0, common, **more)


def test_a_graph_holds_as_many_requests_as_its_tokens_may_have() -> None:
    assert [most_requests(size, 1 + DRAFTS) for size in (32, 256, 512, 1024)] == [64, 64, 128, 256]


def test_no_batch_gets_a_graph_that_it_fills() -> None:
    manager = SimpleNamespace(lora_capture_cases=[0], _capture_descs={}, _candidates={})
    full = CUDAGraphMode.FULL
    held = {4: 2, 8: 2, 12: 3, 16: 9, 20: 10}
    graphs = [BatchExecutionDescriptor(cg_mode=full, num_tokens=size, num_reqs=held[size]) for size in held]
    mixed_graphs._offer(manager, graphs, spare=1)
    sizes = {tokens: [graph.num_tokens for graph in found] for (tokens, _), found in manager._candidates.items()}
    # A batch with more requests than the first graph holds finds the next graph that holds them.
    expected = {3: [4, 12, 16], 7: [8, 12, 16], 11: [12, 16, 20], 15: [16, 20], 19: [20]}
    assert sizes == {tokens: expected[tokens | 3] for tokens in range(1, 20)}
    assert manager._capture_descs == {full: graphs[::-1]}
