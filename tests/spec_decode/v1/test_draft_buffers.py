"""Buffers at fixed addresses, and rows past the batch that no kernel reads anything through."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_buffers import PassBuffers, full_block_table, rows_held, unmanaged_field  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_decision import pad_up  # noqa: E402

from ..drafters import FIELDS, MAX_LEN, MAX_REQS, MAX_TOKENS, Runner, clone_metadata  # noqa: E402

CPU = torch.device("cpu")
K = 3
LADDER = (1, 2, 4, MAX_REQS)
HOST_ROWS = {"_seq_lens_cpu", "_num_computed_tokens_cpu", "seq_lens_cpu_upper_bound", "is_prefilling"} & FIELDS


@pytest.fixture
def runner():
    return Runner(7)


@pytest.fixture
def slots():
    return torch.full((MAX_TOKENS,), -1, dtype=torch.int64)


def addresses(buffers):
    return buffers.query_start_loc.data_ptr(), buffers.seq_lens.data_ptr()


def snapshot(metadata):
    """Every field, tensors by value."""
    return {
        name: value.tolist() if isinstance(value := getattr(metadata, name), torch.Tensor) else value for name in FIELDS
    }


def shape_for(metadata, query_len):
    if query_len is None:
        return GraphShape(metadata.num_actual_tokens + 5, MAX_REQS, query_len=None)
    return uniform_shape(query_len, pad_up(LADDER, metadata.num_reqs))


@pytest.mark.parametrize("query_len", [1 + K, 1, None])
def test_many_batches_through_one_set_of_buffers(runner, slots, query_len):
    buffers = PassBuffers(MAX_REQS, query_len, CPU)
    at = addresses(buffers)
    for index in range(60):
        k = K if query_len is None else query_len - 1
        metadata = runner.batch(k, "decode" if query_len else "mixed")["common_attn_metadata"]
        before, batch, tokens = snapshot(metadata), metadata.num_reqs, metadata.num_actual_tokens
        shape = shape_for(metadata, query_len)
        # What an earlier, fuller batch left behind.
        buffers.seq_lens[batch:].fill_(1000 + index)
        slots[:tokens].copy_(metadata.slot_mapping)
        slots[tokens : shape.num_tokens].fill_(-1)
        buffers.write(metadata, shape)
        view = buffers.view(metadata, shape, slots)

        assert addresses(buffers) == at
        assert (view.query_start_loc.data_ptr(), view.seq_lens.data_ptr()) == at
        assert view.slot_mapping.data_ptr() == slots.data_ptr()
        assert view.block_table_tensor.data_ptr() == runner.table.data_ptr()

        starts = before["query_start_loc"] + [tokens] * (shape.num_reqs - batch)
        assert view.query_start_loc.tolist() == starts
        assert view.query_start_loc_cpu.tolist() == starts
        assert view.query_start_loc.dtype == view.query_start_loc_cpu.dtype == torch.int32
        assert view.seq_lens.tolist() == before["seq_lens"] + [0] * (shape.num_reqs - batch)
        assert view.slot_mapping.tolist() == before["slot_mapping"] + [-1] * (shape.num_tokens - tokens)
        assert view.block_table_tensor.tolist() == runner.table[: shape.num_reqs].tolist()
        assert (view.num_reqs, view.num_actual_tokens) == (shape.num_reqs, shape.num_tokens)
        assert view.max_query_len == (query_len or before["max_query_len"])
        assert view.max_seq_len == before["max_seq_len"]
        for name in HOST_ROWS:
            rows = getattr(view, name)
            assert rows.tolist() == before[name] + [0] * (shape.num_reqs - batch)
            assert rows.dtype == getattr(metadata, name).dtype
        assert snapshot(metadata) == before


def test_rows_are_taken_from_the_batch_not_from_its_padding(runner, slots):
    """A caller's host tensors may have more rows than the graph: vLLM gives some of them unsliced."""
    metadata = runner.batch(K, size=2)["common_attn_metadata"]
    name = min(HOST_ROWS)
    long = torch.cat([getattr(metadata, name), getattr(metadata, name)])
    buffers = PassBuffers(MAX_REQS, 1 + K, CPU)
    view = buffers.view(dataclasses.replace(metadata, **{name: long}), uniform_shape(1 + K, 2), slots)
    assert getattr(view, name).tolist() == long[:2].tolist()


def test_caches_of_the_unpadded_batch_are_dropped(runner, slots):
    metadata = runner.batch(K, size=2)["common_attn_metadata"]
    caches = {"positions", "_num_computed_tokens_cache", "_token_to_req_indices_cache"} & FIELDS
    assert caches
    metadata = dataclasses.replace(metadata, **{name: torch.ones(8) for name in caches})
    view = PassBuffers(MAX_REQS, 1 + K, CPU).view(metadata, uniform_shape(1 + K, 2), slots)
    for name in caches:
        assert getattr(view, name) is None
        assert getattr(metadata, name) is not None


@pytest.mark.parametrize(
    "counts",
    [
        [(3, 4), (4, 4), (3, 4)],  # another batch on one rung
        [(2, 4), (2, 2), (2, 4)],  # one batch on another rung
        [(1, 9), (9, 9), (1, 1), (1, 9)],
        [(4, 4), (4, 4), (2, 4)],
    ],
)
def test_uniform_starts_follow_batch_and_rung(runner, counts):
    buffers = PassBuffers(MAX_REQS, 1 + K, CPU)
    for batch, rung in counts:
        buffers.write(runner.batch(K, size=batch)["common_attn_metadata"], uniform_shape(1 + K, rung))
        expected = [min(row, batch) * (1 + K) for row in range(rung + 1)]
        assert buffers.query_start_loc[: rung + 1].tolist() == expected


def test_uniform_starts_are_written_once_for_equal_counts(runner):
    buffers = PassBuffers(MAX_REQS, 1 + K, CPU)
    shape = uniform_shape(1 + K, 4)
    buffers.write(runner.batch(K, size=3)["common_attn_metadata"], shape)
    version = buffers.query_start_loc._version
    buffers.write(runner.batch(K, size=3)["common_attn_metadata"], shape)
    assert buffers.query_start_loc._version == version
    buffers.write(runner.batch(K, size=4)["common_attn_metadata"], shape)
    assert buffers.query_start_loc._version > version


def test_seq_lens_are_written_in_place():
    buffers = PassBuffers(6, 1, CPU)
    at = addresses(buffers)
    buffers.seq_lens.fill_(9)
    buffers.write_seq_lens(torch.tensor([5, 6], dtype=torch.int32), 4)
    assert buffers.seq_lens.tolist() == [5, 6, 0, 0, 9, 9]
    buffers.write_seq_lens(torch.tensor([7, 8], dtype=torch.int32), 2)
    assert buffers.seq_lens.tolist() == [7, 8, 0, 0, 9, 9]
    assert addresses(buffers) == at


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (uniform_shape(4, 3), [4, 4, 4]),
        (uniform_shape(1, 4), [1, 1, 1, 1]),
        (GraphShape(11, 3, query_len=None), [3, 3, 5]),
        (GraphShape(2, 2, query_len=None), [1, 1]),
    ],
)
def test_a_batch_for_capture_fills_the_shape(runner, shape, lengths):
    template = runner.template()
    before = snapshot(template)
    query_len = shape.query_len
    full = PassBuffers(MAX_REQS, query_len, CPU).batch_for_capture(template, shape, MAX_LEN)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert full.query_start_loc.tolist() == full.query_start_loc_cpu.tolist() == starts
    assert starts[-1] == full.num_actual_tokens == shape.num_tokens
    assert full.seq_lens.tolist() == lengths
    assert full.num_reqs == shape.num_reqs
    # What a captured kernel chose by these must hold for every batch that replays it.
    assert full.max_query_len == (query_len or shape.num_tokens)
    assert full.max_seq_len == MAX_LEN
    assert full.block_table_tensor.shape[0] == shape.num_reqs
    assert full.block_table_tensor.data_ptr() == runner.table.data_ptr()
    assert full.causal is True
    for name in HOST_ROWS:
        rows = getattr(full, name)
        assert rows.tolist() == (lengths if "seq_lens" in name else [0] * shape.num_reqs)
        assert rows.dtype == getattr(template, name).dtype
    assert snapshot(template) == before


def test_block_table_rows_past_the_slice_are_the_storages():
    table = torch.arange(24).view(6, 4)
    assert full_block_table(table[:2], 2).tolist() == table[:2].tolist()
    assert full_block_table(table[:4], 2).tolist() == table[:2].tolist()
    grown = full_block_table(table[:2], 6)
    assert grown.tolist() == table.tolist()
    assert grown.data_ptr() == table.data_ptr()
    # A table that begins inside its storage, and rows that are wider than the slice.
    assert full_block_table(table[2:3], 4).tolist() == table[2:].tolist()
    assert full_block_table(table[:1, :3], 6).tolist() == table[:, :3].tolist()


@pytest.mark.parametrize("start", [0, 2, 5])
def test_rows_held_are_those_from_the_tables_first_to_the_storages_last(start):
    table = torch.arange(24).view(6, 4)
    assert rows_held(table[start : start + 1]) == 6 - start
    assert rows_held(table[start:, 1:3]) == 6 - start


@pytest.mark.parametrize(("start", "num_reqs"), [(0, 7), (2, 5), (5, 2)])
def test_block_table_whose_storage_is_too_short(start, num_reqs):
    table = torch.arange(24).view(6, 4)[start : start + 1]
    with pytest.raises(RuntimeError) as caught:
        full_block_table(table, num_reqs)
    message = str(caught.value)
    assert f"has 1 rows and its storage ends before row {num_reqs}" in message
    assert "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH=off" in message


def test_a_plain_batch_is_managed(runner):
    assert unmanaged_field(runner.template()) is None


@pytest.mark.parametrize(
    "field",
    ["logits_indices_padded", "encoder_seq_lens", "dcp_local_seq_lens", "rswa_prefix_lens"],
)
def test_unmanaged_field(runner, field):
    if field not in FIELDS:
        pytest.skip(f"this vLLM's CommonAttentionMetadata has no {field}")
    assert unmanaged_field(dataclasses.replace(runner.template(), **{field: torch.ones(1)})) == field


@pytest.mark.parametrize(
    ("ranges", "field"),
    [({}, None), ({0: [], 1: []}, None), ({0: [], 1: [(4, 9)]}, "mm_req_doc_ranges")],
)
def test_image_ranges_count_where_there_are_any(runner, slots, ranges, field):
    if "mm_req_doc_ranges" not in FIELDS:
        pytest.skip("this vLLM's CommonAttentionMetadata has no mm_req_doc_ranges")
    metadata = dataclasses.replace(runner.batch(K, size=2)["common_attn_metadata"], mm_req_doc_ranges=ranges)
    assert unmanaged_field(metadata) == field
    if field is None:
        view = PassBuffers(MAX_REQS, 1 + K, CPU).view(metadata, uniform_shape(1 + K, 4), slots)
        assert view.mm_req_doc_ranges is None


def test_a_causal_flag_for_each_request_is_unmanaged(runner):
    template = clone_metadata(runner.template())
    template.causal = torch.tensor([True])
    assert unmanaged_field(template) == "causal"
    template.causal = False
    assert unmanaged_field(template) is None
