# SPDX-License-Identifier: Apache-2.0
"""Capture sizes of a DFlash engine, on stated cases and on random ones."""

from __future__ import annotations

import random

import pytest

from vllm_hwplugin.spec_decode.dflash_sizes import (
    LARGEST_DEFAULT,
    CaptureSizes,
    Dropped,
    capture_sizes,
    describe,
    explain,
)


def random_cases(seed: int, count: int = 400) -> list[dict]:
    draw = random.Random(seed)
    cases = []
    for _ in range(count):
        given = draw.choice([None, [draw.randint(1, 600) for _ in range(draw.randint(1, 12))]])
        cases.append(
            {
                "block": draw.randint(2, 17),
                "max_num_seqs": draw.choice([1, 2, 3, 5, 8, 31, 64, 100, 256, 1000, draw.randint(1, 1024)]),
                "max_num_batched_tokens": draw.choice([32, 100, 512, 2048, 8192, draw.randint(20, 16384)]),
                "user_sizes": given,
                "user_max": draw.choice([None, None, draw.randint(1, 4096)]),
            }
        )
    return cases


def of_defaults(cases: list[dict]) -> list[dict]:
    return [{**case, "user_sizes": None} for case in cases]


@pytest.mark.parametrize("seed", range(5))
def test_sizes_are_whole_blocks_ascending_and_within_every_limit(seed: int) -> None:
    found = 0
    for case in random_cases(seed):
        sizes = capture_sizes(**case).sizes
        limit = min(case["max_num_batched_tokens"], case["user_max"] or case["max_num_batched_tokens"])
        assert all(size % case["block"] == 0 and case["block"] <= size <= limit for size in sizes), case
        assert list(sizes) == sorted(set(sizes)), case
        found += bool(sizes)
    assert found > 200


@pytest.mark.parametrize("seed", range(5))
def test_the_fullest_batch_that_the_limits_allow_has_a_size_of_its_own(seed: int) -> None:
    for case in of_defaults(random_cases(seed)):
        block, limit = case["block"], min(case["max_num_batched_tokens"], case["user_max"] or LARGEST_DEFAULT)
        fullest = min(case["max_num_seqs"], limit // block)
        sizes = capture_sizes(**case).sizes
        assert (sizes[-1] if sizes else 0) == fullest * block, case


@pytest.mark.parametrize("seed", range(5))
def test_less_than_an_eighth_of_a_batch_is_padding(seed: int) -> None:
    for case in of_defaults(random_cases(seed, 60)):
        block, sizes = case["block"], capture_sizes(**case).sizes
        for requests in range(1, (sizes[-1] if sizes else 0) // block + 1):
            padded = next(size for size in sizes if size >= requests * block)
            assert (padded - requests * block) * 8 < requests * block, (case, requests)


@pytest.mark.parametrize("seed", range(5))
def test_its_own_result_as_the_users_sizes_comes_out_unchanged(seed: int) -> None:
    for case in random_cases(seed):
        default_sizes = () if case["user_sizes"] else (1, 2, 4, *range(8, 513, 8))
        sizes = capture_sizes(**case, default_sizes=default_sizes).sizes
        if sizes:
            again = {**case, "user_sizes": list(sizes), "user_max": sizes[-1]}
            assert capture_sizes(**again, default_sizes=sizes) == CaptureSizes(sizes), case


@pytest.mark.parametrize("seed", range(5))
def test_every_size_of_the_user_is_captured_or_explained(seed: int) -> None:
    for case in random_cases(seed):
        if (given := case["user_sizes"]) is not None:
            found = capture_sizes(**case)
            lost = [item.size for item in found.dropped]
            kept = () if found.replaced else found.sizes
            assert sorted([*kept, *lost]) == sorted(set(given)), case
            text = explain(found, case["block"])
            assert (text is None) == (not lost)
            assert all(str(size) in text for size in lost)


@pytest.mark.parametrize("max_num_batched_tokens", [8192, 16384])
def test_what_vllm_takes_on_a_large_gpu_captures_no_more_than_stock(max_num_batched_tokens: int) -> None:
    stock = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    found = capture_sizes(16, 1024, max_num_batched_tokens, default_sizes=stock)
    assert found.sizes[-1] == LARGEST_DEFAULT == 2048
    assert len(found.sizes) == 40 <= len(stock)
    # vLLM's own largest, on the GPUs where it is more.
    assert capture_sizes(16, 64, 16384, default_sizes=[1024, 4096]).sizes[-1] == 4096


def test_a_largest_size_of_the_user_may_be_above_the_bound() -> None:
    assert capture_sizes(16, 1024, 16384, user_max=16384).sizes[-1] == 16384
    assert capture_sizes(16, 1024, 16384, user_sizes=[16, 16384]).sizes == (16, 16384)


def test_all_counts_up_to_sixteen_then_eight_an_octave() -> None:
    counts = [size // 8 for size in capture_sizes(8, 130, 8192).sizes]
    assert counts == [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), 130]


def test_sizes_above_the_fullest_decode_batch_stay_for_mixed_batches() -> None:
    # vLLM's own list for 8 requests of 4 tokens ends at twice the fullest batch.
    found = capture_sizes(4, 8, 2048, default_sizes=[1, 2, 4, 8, 16, 24, 32, 42, 50, 64])
    assert found.sizes == (4, 8, 12, 16, 20, 24, 28, 32, 44, 52, 64)
    assert capture_sizes(8, 4, 60, default_sizes=[1, 32, 40, 60]).sizes == (8, 16, 24, 32, 40)


def test_the_users_sizes_are_kept_where_they_are_whole_blocks() -> None:
    found = capture_sizes(8, 256, 2048, user_sizes=[64, 8, 12, 8, 4096, 1])
    assert found.sizes == (8, 64)
    assert not found.replaced
    assert [item.size for item in found.dropped] == [1, 12, 4096]
    assert explain(found, 8) == (
        "of the given cudagraph_capture_sizes these are dropped: 1, 12 (not a multiple of 1 + num_speculative_tokens = "
        "8); 4096 (more than max_num_batched_tokens = 2048)"
    )


def test_where_none_of_the_users_sizes_is_left_blocks_up_to_the_largest_take_their_place() -> None:
    found = capture_sizes(8, 256, 2048, user_sizes=[1, 30, 20])
    assert (found.sizes, found.replaced) == ((8, 16, 24), True)
    assert explain(found, 8).endswith("multiples of 8 up to the largest one take their place")
    # Not even one block: a single one, not the whole ladder that the user did not ask for.
    assert capture_sizes(8, 256, 2048, user_sizes=[1, 2, 4]).sizes == (8,)


def test_sizes_that_hold_nothing_are_dropped() -> None:
    found = capture_sizes(8, 256, 2048, user_sizes=[-8, 0, 8])
    assert (found.sizes, [item.size for item in found.dropped]) == ((8,), [-8, 0])


def test_a_largest_size_of_the_user_bounds_the_ladder() -> None:
    assert capture_sizes(8, 256, 2048, user_max=30).sizes == (8, 16, 24)
    assert capture_sizes(8, 256, 2048, user_max=7).sizes == ()
    found = capture_sizes(8, 256, 2048, user_sizes=[8, 32], user_max=16)
    assert found == CaptureSizes((8,), (Dropped(32, "more than max_cudagraph_capture_size = 16"),))


def test_the_phrase_for_the_record_counts_requests_that_there_can_be() -> None:
    assert describe((8, 16, 64), 8, 2) == "3 capture sizes in blocks of 8 tokens, up to 64 tokens (2 of 2 requests)"
    more = "max_cudagraph_capture_size takes a larger bound"
    assert describe((8, 16), 8, 4).endswith(f"(2 of 4 requests; {more})")
