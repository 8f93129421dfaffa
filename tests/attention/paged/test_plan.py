# SPDX-License-Identifier: Apache-2.0
"""Batches are cut so that every row has a program, the device is full, and the scratch memory suffices."""

from __future__ import annotations

import pytest

from vllm_hwplugin.attention.paged import _plan
from vllm_hwplugin.attention.paged._plan import MAX_SPLITS, SCRATCH_ROWS, Heights, LaunchPlan, plan_launch

HOPPER = ((64, 1),)
TRITON = ((16, 4), (32, 2), (64, 1))


def plan(heights: Heights = HOPPER, **given: int) -> LaunchPlan:
    settings = {
        "num_requests": 1,
        "num_tokens": 1,
        "max_query_len": 1,
        "num_heads": 8,
        "num_kv_heads": 1,
        "multiprocessors": 132,
        "batch_invariant": False,
    }
    return plan_launch(heights, **{**settings, **given})  # type: ignore[arg-type]


def blocks_of(found: LaunchPlan, lengths: list[int]) -> list[int]:
    """For each block the tokens it has, as the kernels work it out."""
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    tokens = []
    for block in range(found.blocks):
        if found.blocks_per_request:
            row, skipped = block // found.blocks_per_request, block % found.blocks_per_request * found.tokens
        else:
            row = max(row for row in range(len(lengths)) if starts[row] // found.tokens + row <= block)
            skipped = (block - (starts[row] // found.tokens + row)) * found.tokens
        tokens.append(max(0, min(lengths[row] - skipped, found.tokens)))
    return tokens


@pytest.mark.parametrize("heights", [HOPPER, TRITON])
@pytest.mark.parametrize(
    "lengths", [[1], [1] * 64, [8] * 5, [3, 0, 5], [1] * 40 + [900], [8192], [0, 0, 700, 1, 0, 33], [2000, 3000]]
)
@pytest.mark.parametrize("heads", [(8, 1), (8, 4), (6, 2), (64, 1), (5, 5)])
def test_every_token_has_a_block(heights: Heights, lengths: list[int], heads: tuple[int, int]) -> None:
    found = plan(
        heights,
        num_requests=len(lengths),
        num_tokens=sum(lengths),
        max_query_len=max(lengths),
        num_heads=heads[0],
        num_kv_heads=heads[1],
    )
    assert sum(blocks_of(found, lengths)) == sum(lengths)
    assert found.tokens * (heads[0] // heads[1]) <= found.rows


def test_blocks_are_searched_for_only_where_requests_differ_much() -> None:
    assert plan(num_requests=64, num_tokens=64 * 9, max_query_len=9).blocks_per_request == 2
    # 192 blocks, where 128 would do with a search.
    assert plan(num_requests=64, num_tokens=64 * 8, max_query_len=17).blocks_per_request == 3
    mixed = plan(num_requests=65, num_tokens=64 + 8192, max_query_len=8192)
    assert mixed.blocks_per_request == 0
    assert mixed.blocks == (64 + 8192) // 8 + 65


@pytest.mark.parametrize(
    ("requests", "kv_heads", "splits"), [(1, 1, 128), (8, 1, 16), (64, 1, 2), (64, 4, 1), (8, 4, 4), (140, 1, 3)]
)
def test_small_batches_are_split_until_the_device_is_full(requests: int, kv_heads: int, splits: int) -> None:
    assert plan(num_requests=requests, num_tokens=requests, num_kv_heads=kv_heads).splits == splits


def test_splits_fill_whole_rounds() -> None:
    for programs in range(1, 400):
        splits = _plan._splits(programs, 64, 132)
        rounds = -(-programs * splits // 132)
        alternatives = range(1, min(MAX_SPLITS, SCRATCH_ROWS // (programs * 64)) + 1)
        best = min(-(-programs * one // 132) / one for one in alternatives)
        assert rounds / splits <= best * 1.05
        assert programs * splits * 64 <= SCRATCH_ROWS


def test_no_split_and_one_tile_where_rows_must_not_depend_on_the_batch() -> None:
    for requests in (1, 3, 64):
        found = plan(TRITON, num_requests=requests, num_tokens=requests, batch_invariant=True)
        assert (found.rows, found.splits) == (64, 1)
