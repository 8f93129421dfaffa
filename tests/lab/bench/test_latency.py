from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy")

from vllm_hwplugin_lab.bench import _serving_load
from vllm_hwplugin_lab.bench._latency import load_entry
from vllm_hwplugin_lab.bench._serving_load import latencies, run_load


def test_latencies_of_one_request():
    found = latencies([10.0, 10.5, 10.6, 10.9])
    assert (found["ttft"], found["e2e"], found["gaps"]) == (0.5, pytest.approx(0.9), pytest.approx([0.1, 0.3]))
    assert latencies([10.0]) == {"ttft": None, "e2e": None, "gaps": []}


def round_of(requests, seconds):
    return {
        "host_us": 1.0,
        "seconds": seconds,
        "steps": 4,
        "drafts": 5,
        "accepted_per_position": [4, 1],
        "graphs": [{"model": "drafter", "unpadded": 3, "padded": 4, "mode": "FULL", "count": 7}],
        "requests": requests,
    }


def test_all_requests_of_all_rounds_make_the_percentiles():
    # 100 requests of 1 ms to 100 ms to the first token, 11 tokens each, one more after every 2 ms.
    requests = [
        {"prompt_tokens": 2, "tokens": 11, "ttft": n / 1e3, "e2e": n / 1e3 + 0.02, "gaps": [0.002] * 10}
        for n in range(1, 101)
    ]
    alone = [{"prompt_tokens": 2, "tokens": 1, "ttft": 0.0505, "e2e": 0.0505, "gaps": []}]
    entry = load_entry([round_of(requests[:50], 2.0), round_of([*requests[50:], *alone], 1.0)])
    assert entry["ttft_ms"]["p50"] == pytest.approx(50.5)
    assert entry["ttft_ms"]["p99"] == pytest.approx(99.0, abs=0.1)
    # One token has no time per token after the first.
    assert entry["tpot_ms"] == pytest.approx({"mean": 2.0, "p50": 2.0, "p99": 2.0})
    assert entry["itl_ms"]["p99"] == pytest.approx(2.0)
    assert entry["e2e_ms"]["mean"] == pytest.approx((sum(range(1, 101)) + 20 * 100 + 50.5) / 101)
    assert entry["tokens_per_second"]["all"] == [275.0, 551.0]
    assert (entry["requests"], entry["tokens"], entry["steps"]) == (101, 1101, 8)
    assert entry["acceptance_per_position"] == [0.8, 0.2]
    assert entry["graphs"] == [{"model": "drafter", "unpadded": 3, "padded": 4, "mode": "FULL", "count": 14}]
    assert load_entry([]) is None


def test_a_request_that_got_nothing_is_not_the_quickest():
    answered = {"prompt_tokens": 2, "tokens": 2, "ttft": 0.25, "e2e": 0.5, "gaps": [0.25]}
    given_up = {"prompt_tokens": 2, "tokens": 0, **latencies([10.0])}
    entry = load_entry([round_of([answered, given_up], 1.0)])
    assert [entry[name]["p50"] for name in ("ttft_ms", "e2e_ms", "itl_ms")] == [250.0, 500.0, 250.0]
    assert (entry["requests"], entry["unanswered"]) == (2, 1)
    assert load_entry([round_of([given_up], 1.0)])["ttft_ms"] is None


def test_a_part_of_the_stream_without_a_token_is_no_part():
    """vLLM's own sampling parameters, and an engine that answers each request in three parts."""
    pytest.importorskip("vllm")
    asked = []

    class Engine:
        class vllm_config:
            model_config = None

        async def generate(self, prompt, sampling, name):
            asked.append((prompt["prompt_token_ids"], sampling.max_tokens, sampling.temperature, sampling.ignore_eos))
            for tokens in ([7], [], [8, 9]):
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])

    load = {"concurrency": 0, "temperature": 0.5, "ignore_eos": True, "detokenize": False, "seed": 0}
    requests = [{"prompt": (1, 2), "max_tokens": 3, "at": 0.0}, {"prompt": (4,), "max_tokens": 5, "at": 0.0}]
    found = asyncio.run(run_load(Engine(), {**load, "requests": requests}))["requests"]
    assert asked == [([1, 2], 3, 0.5, True), ([4], 5, 0.5, True)]
    assert [(one["prompt_tokens"], one["tokens"], len(one["gaps"])) for one in found] == [(2, 3, 1), (1, 3, 1)]


def test_a_load_keeps_its_bound_and_its_times(monkeypatch):
    running, most, begun = 0, 0, []

    async def request(engine, name, prompt, load, max_tokens):
        nonlocal running, most
        number = int(name.rpartition(" ")[2])
        begun.append((number, time.perf_counter()))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return {"number": number, "tokens": max_tokens}

    monkeypatch.setattr(_serving_load, "_request", request)
    monkeypatch.setattr(_serving_load, "prompt_ids", lambda model, load: [[1]] * len(load["requests"]))
    requests = [{"prompt": 1, "max_tokens": n, "at": 0.2 if n == 5 else 0.0} for n in range(6)]

    class Engine:
        class vllm_config:
            model_config = None

    since = time.perf_counter()
    found = asyncio.run(run_load(Engine(), {"requests": requests, "concurrency": 2}))
    assert most == 2
    assert [one["number"] for one in found["requests"]] == list(range(6))
    assert begun[-1][0] == 5
    assert begun[-1][1] - since >= 0.2
