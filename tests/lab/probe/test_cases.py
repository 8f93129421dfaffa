# SPDX-License-Identifier: Apache-2.0
"""Which batches are drawn."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.probe import CAPABILITIES, Plain, draw, trials

PLAIN = Plain("bfloat16", 64, 16)
ALL = trials()


def drawn(seed=3, count=8):
    return [(trial, case) for trial in ALL for case in draw(trial, PLAIN, seed, count)]


def trial(capability, value="yes"):
    return next(one for one in ALL if one.key == (capability, value))


def test_a_seed_means_the_same_batches_and_another_seed_others():
    assert drawn(seed=3) == drawn(seed=3)
    for one in ALL:
        assert draw(one, PLAIN, 3, 4) != draw(one, PLAIN, 4, 4)
        assert len({case.seed for case in draw(one, PLAIN, 3, 4)}) == 4


def test_every_trial_is_of_one_value_and_the_plain_batch_comes_first():
    assert len({one.key for one in ALL}) == len(ALL)
    assert ALL[0].key == ("plain", "causal")
    assert {one.capability for one in ALL} == set(CAPABILITIES)


def test_every_case_is_a_batch_that_a_runner_could_make():
    for one, case in drawn():
        assert case.num_heads % case.num_kv_heads == 0
        assert all(request.query >= 1 and request.context >= 0 for request in case.requests), case
        bound = PLAIN.longest + max(PLAIN.longest, 4 * case.block_size)
        assert max(request.total for request in case.requests) <= bound
        assert case.num_tokens == sum(request.query for request in case.requests)
        assert (case.padding > 0) == (one.capability == "padded_batch")


@pytest.mark.parametrize(
    ("capability", "value", "has"),
    [
        ("head_size", "320", lambda case: case.head_size == 320),
        ("dtype", "float16", lambda case: case.dtype == "float16" and case.kv_cache_dtype == "auto"),
        ("kv_cache_dtype", "fp8_e5m2", lambda case: (case.dtype, case.kv_cache_dtype) == ("bfloat16", "fp8_e5m2")),
        ("kv_cache_dtype", "float16", lambda case: (case.dtype, case.kv_cache_dtype) == ("float16", "float16")),
        ("block_size", "48", lambda case: case.block_size == 48),
        ("group", "8", lambda case: case.num_heads == 8 * case.num_kv_heads),
        ("non_causal", "yes", lambda case: not case.causal),
        ("non_causal_head_size", "512", lambda case: not case.causal and case.head_size == 512),
        ("sinks", "yes", lambda case: case.sinks),
        ("sinks", "head size 512", lambda case: case.sinks and case.head_size == 512),
        ("group", "16, head size 512", lambda case: case.num_heads == 16 * case.num_kv_heads),
        ("batch_invariance", "yes", lambda case: case.alone),
        ("captured", "decode", lambda case: set(case.graph) == {1}),
        ("captured", "mixed", lambda case: set(case.graph) == {1} and max(r.query for r in case.requests) > 1),
        ("captured", "verify", lambda case: len(set(case.graph)) == 1 and 2 <= case.graph[0] <= 32),
        ("alibi", "yes", lambda case: case.alibi),
        ("plain", "causal", lambda case: case.causal and case.sliding_window is None and case.softcap is None),
    ],
)
def test_every_case_has_what_its_trial_asks_for(capability, value, has):
    for case in draw(trial(capability, value), PLAIN, 1, 20):
        assert has(case)


def test_batches_that_cannot_show_the_capability_are_not_drawn():
    for seed in range(30):
        for case in draw(trial("sliding_window"), PLAIN, seed, 5):
            assert any(request.total > case.sliding_window for request in case.requests)
        for case in draw(trial("non_causal"), PLAIN, seed, 5):
            assert any(request.query > 1 for request in case.requests)
        for case in draw(trial("padded_batch"), PLAIN, seed, 5):
            assert len({request.query for request in case.requests}) == 1


def test_every_batch_of_a_graph_fits_its_rows_and_one_fills_them():
    for value in ("decode", "verify", "mixed", "non-causal verify, head size 512"):
        for case in draw(trial("captured", value), PLAIN, 2, 20):
            batches = (case.requests, *case.replays)
            assert len(batches) == len({str(batch) for batch in batches}) > 2
            for batch in batches:
                assert len(batch) <= len(case.graph)
                assert sum(request.query for request in batch) <= sum(case.graph)
            if value != "mixed":
                assert all(request.query == case.graph[0] for batch in batches for request in batch)
                assert max(len(batch) for batch in batches) == len(case.graph)


def test_windows_to_both_sides_end_within_the_queries():
    for case in draw(trial("non_causal_window"), PLAIN, 2, 20):
        assert any(request.query > case.sliding_window for request in case.requests)
        assert not case.causal


def test_verification_reaches_32_tokens_and_contexts_of_decodes_have_a_bound_of_their_own():
    cases = [case for seed in range(60) for case in draw(ALL[0], Plain("bfloat16", 64, 16, 300, 8000), seed, 5)]
    uniform = [case.requests for case in cases if all(1 <= r.query <= 32 and r.context for r in case.requests)]
    assert max(r.query for row in uniform for r in row) > 25
    assert 6000 < max(r.context for row in uniform for r in row) < 8000


def test_large_heads_are_tried_in_few_shapes():
    """A kernel that is compiled for each of them would otherwise take minutes."""
    for one in ALL:
        if one.settings.get("head_size", 0) <= 256 or one.capability == "group":
            continue
        cases = draw(one, PLAIN, 5, 20)
        assert {case.num_heads // case.num_kv_heads for case in cases} == {4}, one
        assert set(one.kinds) == {"mixed", "decode"}


def test_five_cases_hold_decodes_prefills_a_mix_and_block_borders():
    for seed in range(10):
        cases = draw(ALL[0], PLAIN, seed, 5)
        rows = [case.requests for case in cases]
        assert any(all(r.query == 1 for r in row) for row in rows)
        assert any(all(r.context == 0 for r in row) for row in rows)
        assert any(len({r.query for r in row}) > 1 and any(r.context for r in row) for row in rows)
        assert any(all(r.total % 16 in (15, 0, 1) for r in row) for row in rows)


def test_a_selection_keeps_the_plain_batch():
    chosen = [one.key for one in trials(["sinks"])]
    assert chosen == [("plain", "causal"), ("sinks", "yes"), ("sinks", "head size 512")]
    assert trials([]) == ALL


def test_a_case_tells_its_shape_on_one_line():
    text = str(draw(trial("sliding_window"), PLAIN, 1, 1)[0])
    assert "\n" not in text
    for word in ("requests (query+context)", "heads", "of 64", "bfloat16", "blocks of 16", "causal", "window", "seed"):
        assert word in text
