"""What `bench serve` asks of vLLM's client and server, and what is made of the times that come back."""

from __future__ import annotations

import functools
import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("numpy")

from vllm_hwplugin_lab.bench import _server, _shapes
from vllm_hwplugin_lab.bench._gpu_samples import SAMPLED
from vllm_hwplugin_lab.bench.serve import PromptsUnreadable, load_entry, read_prompts, speed, steady


def request(start=0.0, ttft=0.25, gaps=(0.25,), tokens=2):
    return {"prompt_tokens": 2, "tokens": tokens, "start": start, "ttft": ttft, "gaps": list(gaps)}


def round_of(requests, seconds, **more):
    facts = {"host_us": 1.0, "seconds": seconds, "steps": 4, "drafts": 5, "accepted_per_position": [4, 1]}
    facts |= {"kinds": [], **dict.fromkeys(SAMPLED, ()), "ended": len(requests), "until_first": 0.125 * len(requests)}
    facts |= {"cpu": {"client": seconds / 4, "server": seconds / 2}}
    return {**facts, "requests": requests, **more}


def test_all_requests_of_all_rounds_make_the_percentiles():
    # 100 requests of 1 ms to 100 ms to the first token, 11 tokens each, one more after every 2 ms.
    requests = [request(0.0, n / 1e3, [0.002] * 10, 11) for n in range(1, 101)]
    alone = [request(0.0, 0.0505, [], 1)]
    entry = load_entry([round_of(requests[:50], 2.0), round_of([*requests[50:], *alone], 1.0)])
    assert entry["ttft_ms"]["p50"] == pytest.approx(50.5)
    assert entry["ttft_ms"]["p99"] == pytest.approx(99.0, abs=0.1)
    # One token has no time per token after the first.
    assert entry["tpot_ms"] == pytest.approx({"mean": 2.0, "p50": 2.0, "p99": 2.0})
    assert entry["itl_ms"]["p99"] == pytest.approx(2.0)
    assert entry["e2e_ms"]["mean"] == pytest.approx((sum(range(1, 101)) + 20 * 100 + 50.5) / 101)
    # All were sent at once, so no part of the round is steady.
    assert entry["tokens_per_second"]["all"] == [275.0, 551.0]
    assert (entry["requests"], entry["counted"], entry["tokens"], entry["steps"]) == (101, 101, 1101, 8)
    assert entry["acceptance_per_position"] == [0.8, 0.2]
    assert load_entry([]) is None


def test_the_first_third_and_the_end_of_a_round_do_not_count():
    # One after the other, a second each with 4 tokens; the first three take three times as long to begin.
    requests = [request(float(n), 0.6 if n < 3 else 0.2, [0.1] * 3, 4) for n in range(9)]
    assert steady(requests) == (3.0, 8.0)
    entry = load_entry([round_of(requests, 20.0)])
    assert (entry["requests"], entry["counted"]) == (9, 6)
    assert entry["ttft_ms"]["p99"] == pytest.approx(200.0)
    # Five requests have their four tokens within these five seconds, and what comes later is no part of it.
    assert speed(round_of(requests, 20.0)) == pytest.approx(4.0)


def test_a_request_that_got_nothing_is_not_the_quickest():
    entry = load_entry([round_of([request(), request(ttft=None, gaps=(), tokens=0)], 1.0)])
    assert [entry[name]["p50"] for name in ("ttft_ms", "e2e_ms", "itl_ms")] == [250.0, 500.0, 250.0]
    assert (entry["requests"], entry["unanswered"]) == (2, 1)


def kinds(kind, graph, outcome, steps, seconds, host):
    paths = {"a drafting": outcome} if outcome else {}
    return {"kind": kind, "graph": graph, "paths": paths, "steps": steps, "seconds": seconds, "host_seconds": host}


def test_steps_of_one_kind_are_summed_over_rounds():
    quick, slow = (
        kinds("same_requests", "FULL", "served", 30, 0.06, 0.03),
        kinds("prompt", "NONE", "prompt", 5, 0.1, 0.08),
    )
    rounds = [round_of([request()], 1.0, kinds=one) for one in ([quick, slow], [slow, quick])]
    alike = kinds("requests_changed", "FULL", "served", 30, 0.08, 0.03)
    entry = load_entry([*rounds, round_of([request()], 1.0, kinds=[alike])])
    assert entry["kinds"] == [
        kinds("same_requests", "FULL", "served", 60, 0.12, 0.06),
        kinds("prompt", "NONE", "prompt", 10, 0.2, 0.16),
        alike,
    ]


def test_what_passes_outside_the_engine_is_of_those_that_were_answered():
    """Rounds of different length, in each of which a request got nothing, and others ended in the engine than here."""
    silent = request(ttft=None, gaps=(), tokens=0)
    rounds = [
        round_of([request(ttft=0.25), request(ttft=0.5), silent], 1.0, ended=4, until_first=0.5),
        round_of([request(ttft=0.75), silent], 2.0, ended=1, until_first=0.5),
    ]
    entry = load_entry(rounds)
    assert (entry["requests"], entry["unanswered"]) == (5, 2)
    assert entry["outside_ms"] == pytest.approx(1e3 * ((0.25 + 0.5 + 0.75) / 3 - 1.0 / 5))
    assert entry["cpu"] == pytest.approx({"client": 0.25, "server": 0.5})
    assert entry["round_e2e_ms"] == pytest.approx([625.0, 1000.0])


def test_the_tail_of_the_first_tokens_is_of_the_burst_or_of_later():
    """Two rounds of 20 requests, two at once: only the second request of a round waits long, or one in the middle."""
    alone = [request(float(n // 2), 0.1, [0.7], 2) for n in range(20)]
    late = [{**one, "ttft": 0.6} if n == 11 else one for n, one in enumerate(alone)]
    burst = [{**one, "ttft": 0.5} if n == 1 else one for n, one in enumerate(alone)]
    silent = request(ttft=None, gaps=(), tokens=0)
    tail = load_entry([round_of([*late, silent], 10.0), round_of(burst, 10.0)])["ttft_tail"]
    assert [(tail[name]["requests"], tail[name]["above_p95"]) for name in ("burst", "steady")] == [(4, 1), (36, 1)]
    assert tail["p95_ms"] == pytest.approx(120.0)
    assert tail["steady"]["ttft_ms"] == pytest.approx({"mean": 113.9, "p50": 100, "p90": 100, "p99": 425}, abs=0.1)
    assert load_entry([round_of([silent], 1.0)])["ttft_tail"] is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n", "holds no prompt"),
        (b"{", "no JSON"),
        (b'{"prompt": "p"}\n{"answer": 3}', "line 2: no text under turns, .*; found .*answer"),
        (b'{"turns": []}', "line 1: no text"),
        (b"[1]", "line 1: no text"),
        (b"\xff\xfe", "no JSON"),
    ],
)
def test_a_file_without_prompts_says_where(tmp_path, content, said):
    (file := tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(PromptsUnreadable, match=said):
        read_prompts(file)


HTTP = object.__new__(_server.Server)
HTTP.url = "http://server"


class Parser:
    def parse_args(self, words):
        return SimpleNamespace(words=words, num_prompts=3)


@pytest.fixture
def client(monkeypatch):
    """A stand-in of vLLM's client: what it was asked for, with two of three requests answered."""
    found = ModuleType("vllm.benchmarks.serve")
    found.add_cli_args = lambda parser: None
    found.ASYNC_REQUEST_FUNCS = {"openai": "over HTTP"}
    found.get_samples, found.asked = None, []

    async def main_async(args):
        found.asked.append(args.words)
        return {
            "duration": 2.0,
            "input_lens": [3, 3, 3],
            "output_lens": [4, 2, 9],
            "start_times": [time.perf_counter() + seconds for seconds in (0.5, 0.0, 1.0)],
            "ttfts": [0.1, 0.2, 0.0],
            "itls": [[0.3, 0.3], [0.1], []],
            "errors": ["", "", "no answer"],
        }

    found.main_async = main_async
    parsers = ModuleType("vllm.utils.argparse_utils")
    parsers.FlexibleArgumentParser = Parser
    benchmarks = ModuleType("vllm.benchmarks")
    benchmarks.serve = found
    for module in (ModuleType("vllm"), ModuleType("vllm.utils"), parsers, benchmarks, found):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_a_load_goes_through_vllms_own_client(client):
    load = {"client": ["--seed", "1"], "prompts": None, "chat": True, "output_len": 5, "requests": 3}
    found = _server.run_load(HTTP, "M", load)
    (words,) = client.asked
    detailed = ["--save-detailed", "--num-prompts", "3", "--seed", "1"]
    assert words == ["--base-url", "http://server", "--model", "M", *detailed]
    assert found["seconds"] == 2.0
    assert found["began"] == pytest.approx(time.time(), abs=1.0)
    assert [(one["ttft"], one["tokens"]) for one in found["requests"]] == [(0.1, 4), (0.2, 2), (None, 0)]
    assert [one["start"] for one in found["requests"]] == pytest.approx([0.5, 0.0, 1.0], abs=0.1)


def test_a_failing_server_asks_for_no_longer_round(client, monkeypatch):
    load = {"client": [], "prompts": None, "chat": True, "output_len": 5, "requests": 3}
    assert _server.run_trial(HTTP, "M", load)["seconds"] == pytest.approx(2.0 * 3 / 2)
    monkeypatch.setattr(client, "main_async", functools.partial(fails, client.main_async))
    with pytest.raises(SystemExit, match="no request of a trial"):
        _server.run_trial(HTTP, "M", load)


async def fails(answers, args):
    return {**await answers(args), "errors": ["refused"] * 3}


def test_a_shapes_text_has_its_tokens_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    _shapes.write_tokenizer(tmp_path, 50)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = [3, 49, 0, 12, 12]
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
    assert tokenizer.vocab_size == 50
    before = (tmp_path / "tokenizer.json").stat().st_mtime_ns
    _shapes.write_tokenizer(tmp_path, 50)
    assert (tmp_path / "tokenizer.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
