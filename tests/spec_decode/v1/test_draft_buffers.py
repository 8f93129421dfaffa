"""Buffers at fixed addresses, and rows past the batch that no kernel reads anything through."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.spec_decode.decode_batch import uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_buffers import PassBuffers, full_block_table, unmanaged_field  # noqa: E402

from ..drafters import MAX_REQS, Runner, clone_metadata  # noqa: E402

CPU = torch.device("cpu")
K = 3


@pytest.fixture
def runner():
    return Runner(7)


@pytest.mark.parametrize(
    "counts",
    [
        [(3, 4), (4, 4), (3, 4)],  # another batch on one rung
        [(1, 9), (9, 9), (1, 1), (1, 9)],  # one batch on another rung
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


def test_block_table_whose_storage_is_too_short():
    with pytest.raises(RuntimeError, match="has 1 rows and its storage ends before row 5"):
        full_block_table(torch.arange(24).view(6, 4)[2:3], 5)


def test_a_causal_flag_for_each_request_is_unmanaged(runner):
    template = clone_metadata(runner.template())
    template.causal = torch.tensor([True])
    assert unmanaged_field(template) == "causal"
    template.causal = False
    assert unmanaged_field(template) is None
