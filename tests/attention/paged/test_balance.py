# SPDX-License-Identifier: Apache-2.0
"""The bounds within which the device shares keys out: a program for each request, and room for each split's result."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_hwplugin.attention.paged._plan import MAX_SPLITS, SCRATCH_ROWS, Balance, LaunchPlan, balance, plan_launch

MULTIPROCESSORS = 132
HEADS = 8


def planned(requests: int, query: int, kv_heads: int, *, batch_invariant: bool = False) -> tuple[LaunchPlan, Balance]:
    plan = plan_launch(
        ((64, 1),),
        num_requests=requests,
        num_tokens=requests * query,
        max_query_len=query,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        multiprocessors=MULTIPROCESSORS,
        batch_invariant=batch_invariant,
    )
    return plan, bounds(plan, kv_heads)


def bounds(plan: LaunchPlan, kv_heads: int) -> Balance:
    return balance(plan, group=HEADS // kv_heads, num_kv_heads=kv_heads, multiprocessors=MULTIPROCESSORS)


@pytest.mark.parametrize("query", [1, 3, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_request_has_a_program_and_every_split_has_room(query: int, kv_heads: int) -> None:
    for requests in range(1, 300):
        plan, found = planned(requests, query, kv_heads)
        rows = min(plan.tokens, query) * HEADS // kv_heads
        assert found.splits <= MAX_SPLITS
        room_for_two = 2 * requests * kv_heads * rows <= SCRATCH_ROWS
        assert (found.programs > 0) == (1 < requests <= 2 * MULTIPROCESSORS // kv_heads and room_for_two)
        if found.programs:
            assert found.splits > 1
            assert found.programs >= requests
            assert found.programs % found.at_once == 0
            # As the kernel lays them out (csrc/paged_attention/results.cuh).
            assert requests * kv_heads * found.splits * rows <= SCRATCH_ROWS


def test_the_device_runs_one_program_on_each_multiprocessor() -> None:
    assert [planned(8, 1, kv_heads)[1].at_once for kv_heads in (1, 4, 8)] == [132, 33, 16]
    assert [planned(requests, 1, 1)[1].programs // 132 for requests in (2, 43, 44, 88, 132, 264)] == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("requests", "query", "invariant"),
    [
        pytest.param(1, 8, False, id="one request has all programs"),
        pytest.param(265, 1, False, id="so many fill the device by themselves"),
        pytest.param(8, 9, False, id="two blocks of queries each"),
        pytest.param(8, 1, True, id="batch invariant"),
    ],
)
def test_other_batches_are_split_alike(requests: int, query: int, invariant: bool) -> None:
    plan, found = planned(requests, query, 1, batch_invariant=invariant)
    assert found == Balance(plan.splits, 0, 0)


def test_blocks_that_are_searched_for_are_split_alike() -> None:
    plan = dataclasses.replace(planned(8, 1, 1)[0], blocks_per_request=0)
    assert bounds(plan, 1) == Balance(plan.splits, 0, 0)
