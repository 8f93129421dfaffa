from __future__ import annotations

from itertools import islice, pairwise

from vllm_hwplugin_lab.bench._soak_engine import requests, wanted

POOL = [tuple(range(start, start + 96)) for start in (0, 1000, 2000)]


def first(count, seed=0):
    return list(islice(requests(POOL, seed, 512), count))


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    assert first(50) == first(50)
    assert first(50) != first(50, seed=1)
    assert list(islice(wanted(0, 32), 500)) == list(islice(wanted(0, 32), 500))


def test_requests_differ_in_both_lengths_and_fit_the_model():
    asked = first(2000)
    assert all(1 <= len(r.prompt) <= 192 and r.max_tokens >= 1 for r in asked)
    assert all(len(r.prompt) + r.max_tokens <= 512 for r in asked)
    # All places within a block of 16 and the border itself, and prompts of less than a block.
    assert {len(r.prompt) % 16 for r in asked} == set(range(16))
    assert min(len(r.prompt) for r in asked) < 16
    assert {r.max_tokens for r in asked} > set(range(1, 161))


def test_some_requests_run_until_the_models_limit():
    at_the_limit = [r for r in first(2000) if len(r.prompt) + r.max_tokens == 512]
    assert 60 < len(at_the_limit) < 250


def test_prompts_are_whole_beginnings_of_those_in_the_pool():
    for r in first(50):
        assert r.prompt[0] in (0, 1000, 2000)
        assert list(r.prompt[:96]) == list(range(r.prompt[0], r.prompt[0] + min(96, len(r.prompt))))


def test_one_request_then_the_most_then_everything_between():
    sizes = list(islice(wanted(3, 32), 10_000))
    assert sizes[0] == 1
    assert 32 in sizes[:60]
    assert set(sizes) == set(range(1, 33))
    changes = sum(a != b for a, b in pairwise(sizes))
    assert changes > 200
