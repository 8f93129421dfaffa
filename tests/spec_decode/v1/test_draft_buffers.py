"""Buffers at fixed addresses, and rows past the batch that no kernel reads anything through."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.spec_decode.decode_batch import uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_buffers import PassBuffers, full_block_table, rows_held, unmanaged_field  # noqa: E402

from ..drafters import FIELDS, MAX_REQS, MAX_TOKENS, Runner, clone_metadata  # noqa: E402

CPU = torch.device("cpu")
K = 3


@pytest.fixture
def runner():
    return Runner(7)


@pytest.fixture
def slots():
    return torch.full((MAX_TOKENS,), -1, dtype=torch.int64)


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
