# SPDX-License-Identifier: Apache-2.0
"""Which batches are drawn."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.probe import CAPABILITIES, Plain, draw, trials

PLAIN = Plain("bfloat16", 64, 16)
ALL = trials()


def trial(capability, value="yes"):
    return next(one for one in ALL if one.key == (capability, value))


def test_a_seed_means_the_same_batches_and_another_seed_others():
    for one in ALL:
        assert draw(one, PLAIN, 3, 4) == draw(one, PLAIN, 3, 4) != draw(one, PLAIN, 4, 4)
        assert len({case.seed for case in draw(one, PLAIN, 3, 4)}) == 4


def test_every_trial_is_of_one_value_and_the_plain_batch_comes_first_in_any_selection():
    assert len({one.key for one in ALL}) == len(ALL)
    assert ALL[0].key == ("plain", "causal")
    assert {one.capability for one in ALL} == set(CAPABILITIES)
    chosen = [one.key for one in trials(["sinks"])]
    assert chosen == [("plain", "causal"), ("sinks", "yes"), ("sinks", "head size 512")]


def test_every_case_is_a_batch_that_a_runner_could_make():
    for one in ALL:
        for case in draw(one, PLAIN, 3, 8):
            assert case.num_heads % case.num_kv_heads == 0
            assert all(request.query >= 1 and request.context >= 0 for request in case.requests), case
            bound = PLAIN.longest + max(PLAIN.longest, 4 * case.block_size)
            assert max(request.total for request in case.requests) <= bound
            assert (case.padding > 0) == (one.capability == "padded_batch")
            assert "\n" not in str(case)


@pytest.mark.parametrize(
    ("capability", "value", "has"),
    [
        ("plain", "causal", lambda case: case.causal and case.sliding_window is None and case.softcap is None),
        ("head_size", "320", lambda case: case.head_size == 320),
        ("dtype", "float16", lambda case: case.dtype == "float16" and case.kv_cache_dtype == "auto"),
        ("kv_cache_dtype", "fp8_e5m2", lambda case: (case.dtype, case.kv_cache_dtype) == ("bfloat16", "fp8_e5m2")),
        ("kv_cache_dtype", "float16", lambda case: (case.dtype, case.kv_cache_dtype) == ("float16", "float16")),
        ("group", "16, head size 512", lambda case: case.num_heads == 16 * case.num_kv_heads),
        ("non_causal", "yes", lambda case: not case.causal and any(one.query > 1 for one in case.requests)),
        ("sliding_window", "yes", lambda case: case.requests[-1].context > case.sliding_window),
        # To both sides: it ends within the queries.
        ("non_causal_window", "yes", lambda case: any(one.query > case.sliding_window for one in case.requests)),
        ("sinks", "head size 512", lambda case: case.sinks and case.head_size == 512),
        ("padded_batch", "yes", lambda case: len({request.query for request in case.requests}) == 1),
        ("captured", "mixed", lambda case: set(case.graph) == {1} and max(r.query for r in case.requests) > 1),
        ("captured", "verify", lambda case: len(set(case.graph)) == 1 and 2 <= case.graph[0] <= 32),
    ],
)
def test_every_case_shows_what_its_trial_asks_for(capability, value, has):
    for seed in range(10):
        assert all(map(has, draw(trial(capability, value), PLAIN, seed, 10)))


@pytest.mark.parametrize("value", ["decode", "verify", "mixed", "non-causal verify, head size 512"])
def test_every_batch_of_a_graph_fits_its_rows_and_one_fills_them(value):
    for case in draw(trial("captured", value), PLAIN, 2, 20):
        batches = (case.requests, *case.replays)
        assert len(batches) == len({str(batch) for batch in batches}) > 2
        for batch in batches:
            assert len(batch) <= len(case.graph)
            assert sum(request.query for request in batch) <= sum(case.graph)
        if value != "mixed":
            assert {request.query for batch in batches for request in batch} == {case.graph[0]}
            assert max(len(batch) for batch in batches) == len(case.graph)


def test_large_heads_are_tried_in_few_shapes():
    """A kernel that is compiled for each of them would otherwise take minutes."""
    for one in ALL:
        if one.settings.get("head_size", 0) > 256 and one.capability != "group":
            assert {case.num_heads // case.num_kv_heads for case in draw(one, PLAIN, 5, 20)} == {4}, one
            assert set(one.kinds) == {"mixed", "decode"}
