# SPDX-License-Identifier: Apache-2.0
"""Buffers at fixed addresses, and rows past the batch that no kernel reads anything through."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.v1.draft_buffers import DraftBuffers, PassBuffers, full_block_table, unmanaged_field
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "counts",
    [
        [(3, 4), (4, 4), (3, 4)],  # another batch on one rung
        [(1, 9), (9, 9), (1, 1), (1, 9)],  # one batch on another rung
    ],
)
def test_uniform_starts_follow_batch_and_rung(counts: list[tuple[int, int]]) -> None:
    buffers = PassBuffers(9, 4, CPU)
    for batch, rung in counts:
        metadata = SimpleNamespace(num_reqs=batch, seq_lens=torch.ones(batch))
        buffers.write(metadata, uniform_shape(4, rung))
        assert buffers.query_start_loc[: rung + 1].tolist() == [min(row, batch) * 4 for row in range(rung + 1)]


def test_rows_past_a_mixed_batch_have_no_tokens() -> None:
    buffers = PassBuffers(4, None, CPU)
    for starts in ([0, 1, 2, 3, 4], [0, 3, 7]):
        metadata = SimpleNamespace(
            num_reqs=len(starts) - 1,
            num_actual_tokens=starts[-1],
            seq_lens=torch.ones(len(starts) - 1),
            query_start_loc=torch.tensor(starts),
        )
        buffers.write(metadata, GraphShape(8, 4, None))
    assert buffers.query_start_loc.tolist() == [0, 3, 7, 7, 7]
    assert buffers.seq_lens.tolist() == [1, 1, 0, 0]


def test_block_table_rows_past_the_slice_are_the_storages() -> None:
    table = torch.arange(24).view(6, 4)
    assert full_block_table(table[:2], 2).tolist() == table[:2].tolist()
    assert full_block_table(table[:4], 2).tolist() == table[:2].tolist()
    grown = full_block_table(table[:2], 6)
    assert grown.tolist() == table.tolist()
    assert grown.data_ptr() == table.data_ptr()
    # A table that begins inside its storage, and rows that are wider than the slice.
    assert full_block_table(table[2:3], 4).tolist() == table[2:].tolist()
    assert full_block_table(table[:1, :3], 6).tolist() == table[:, :3].tolist()
    with pytest.raises(RuntimeError, match="has 1 rows and its storage ends before row 5"):
        full_block_table(table[2:3], 5)


def test_a_block_table_has_moved_if_its_rows_are_elsewhere() -> None:
    table = torch.arange(24).view(6, 4)
    buffers = DraftBuffers(DraftKeys({}, (), 6), table, torch.zeros(6), CPU)
    for found, moved in ((table[:2], False), (table[1:], True), (table.clone(), True), (table[::2], True)):
        assert buffers.block_table_moved(SimpleNamespace(block_table_tensor=found)) is moved


def test_a_causal_flag_for_each_request_is_unmanaged() -> None:
    assert unmanaged_field(SimpleNamespace(causal=torch.tensor([True]))) == "causal"
    assert unmanaged_field(SimpleNamespace(causal=False)) is None
    assert unmanaged_field(SimpleNamespace(causal=False, encoder_seq_lens=torch.ones(1))) == "encoder_seq_lens"
