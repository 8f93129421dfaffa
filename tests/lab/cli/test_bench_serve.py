"""The command ``bench serve`` with the engines replaced: what they are asked for, and what is made of their answers."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest

from tests.program import program
from vllm_hwplugin_lab.bench import Host, Outcome
from vllm_hwplugin_lab.cli import _bench_serve, _sides

pytest.importorskip("numpy")

GPU = Host("cuda", "NVIDIA H200", "580", "0.26.0", "2.11.0", "3.12.3", 16)
ALL = ["stock", "patched", "mrv2", "mrv2-patched"]
CASE = ["--target", "T", "--draft", "D", "--method", "eagle3"]


def options_of(command):
    """Of the client, by name."""
    words = ["--num-prompts", str(command["requests"]), *command["load"]["client"], "--"]
    pairs = pairwise(words)
    return {
        word[2:]: True if value.startswith("--") else value for word, value in pairs if word[2:] and word[:2] == "--"
    }


def answer(job, names, rounds):
    request = {"prompt_tokens": 8, "tokens": 11, "start": 0.0, "ttft": 0.05, "gaps": [0.02] * 10}
    loaded = {
        "event": "loaded",
        "host_us": 500.0,
        "seconds": 1.0,
        "requests": [request] * 4,
        "kinds": [
            {"kind": kind, "graph": graph, "paths": {"v2-tail-graph drafting": made} if job.patched else {}, **times}
            for kind, graph, made, times in (
                ("same_requests", "FULL", "served", {"steps": 6, "seconds": 0.3, "host_seconds": 0.1}),
                ("prompt", "NONE", "prompt", {"steps": 3, "seconds": 0.7, "host_seconds": 0.4}),
            )
        ],
        "gpu_busy": [0.5],
        "gpu_power_w": [500.0, 700.0],
        "ended": 4,
        "until_first": 0.1,
        "cpu": {"client": 0.5, "server": 0.25},
        "steps": 9,
        "drafts": 10,
        "accepted_per_position": [9, 6],
    }
    events = [{**loaded, "workload": name} for _ in range(rounds) for name in names]
    return Outcome(job, ({"event": "ready", "seconds": 1.0}, *events), 2.0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    file = tmp_path / "r.json"

    def call(arguments, host=GPU, stopped=None, measured=True):
        asked = []

        def in_turn(jobs, measurements, *, rounds, at_once, timeout, limit, rest, lock, module, on_event, keep):
            asked.append((jobs, measurements, rounds, at_once))
            names = [one.name for one in measurements if measured]
            found = {
                side: dataclasses.replace(answer(job, names, rounds), stopped=stopped) for side, job in jobs.items()
            }
            keep(found)
            return found

        monkeypatch.setattr(_sides, "measure_in_turn", in_turn)
        monkeypatch.setattr(_bench_serve, "detect_host", lambda: host)
        monkeypatch.setenv("COLUMNS", "200")
        command = ["bench", "serve", "--json", str(file), *arguments]
        result = program(*command)
        return result, json.loads(file.read_text()) if file.exists() else None, asked

    return call


def test_every_load_on_the_same_engines_and_each_k_on_its_own(run):
    loads = ["--concurrency", "1", "--concurrency", "16", "--temperature", "0", "--temperature", "1"]
    result, found, asked = run([*CASE, "--k", "3", "--k", "15", *loads, "--num-prompts", "20"])
    assert result.exit_code == 0, result.output
    assert [list(jobs) for jobs, *_ in asked] == [ALL] * 2
    (jobs, measurements, rounds, at_once), _ = asked
    assert jobs["stock"].options["max_num_seqs"] == 16
    assert jobs["stock"].options["max_model_len"] == 1024 + 256 + 4 * 4 + 64
    assert (rounds, at_once) == (2, False)
    assert {one.trial for one in measurements} == {None}  # the number of requests is said
    client = [options_of(one.round) for one in measurements]
    assert [(one["max-concurrency"], one["temperature"]) for one in client] == [
        (size, temperature) for size in ("1", "16") for temperature in ("0.0", "1.0")
    ]
    random = {"dataset-name": "random", "random-input-len": "1024", "random-output-len": "256", "num-prompts": "20"}
    assert {**client[0], **random} == client[0]
    assert client[0]["ignore-eos"] is True
    assert [one.warm_up["requests"] for one in measurements] == [1, 1, 16, 16]
    assert [jobs["mrv2"].options["speculative_config"]["num_speculative_tokens"] for jobs, *_ in asked] == [3, 15]
    entry = found["cases"][1]["sides"]["mrv2-patched"]["loads"]["16 at once, temperature 1"]
    assert [case["k"] for case in found["cases"]] == [3, 15]
    assert entry["ttft_ms"]["p99"] == pytest.approx(50)
    assert entry["tpot_ms"]["p50"] == pytest.approx(20)
    assert entry["acceptance_per_position"] == [0.9, 0.6]
    assert (entry["gpu_busy"], entry["gpu_power_w"]) == (0.5, 600.0)
    assert [(one["kind"], one["steps"]) for one in entry["kinds"]] == [("same_requests", 12), ("prompt", 6)]
    (line, *_) = [line for line in result.output.splitlines() if "v2-tail-graph drafting" in line]
    assert ("67% / 30%" in line, "prompt 33% / 70%" in line) == (True, True)


@pytest.mark.parametrize(
    ("options", "servers"), [([], 1), (["--api-server-count", "4"], 4), (["--no-http"], 0)], ids=["one", "four", "none"]
)
def test_the_file_and_the_servers_have_the_number_of_api_servers(run, options, servers):
    _, found, ((jobs, *_),) = run([*CASE, *options])
    assert found["settings"]["api_server_count"] == servers
    # Without the option there is no server.
    assert {job.options.get("api_server_count", 0) for job in jobs.values()} == {servers}


def test_a_round_has_as_many_requests_as_take_the_quickest_side_five_seconds(run):
    _, _, ((_, (closed, clocked), *_),) = run([*CASE, "--request-rate", "0", "--request-rate", "12"])
    half = closed.trial["requests"]
    assert (closed.round["requests"], half) == (128, 64)
    assert closed.trial["load"] == closed.round["load"]
    # Some more, because a trial fills and empties the engine as well as a round does, which is longer.
    assert 5 / 0.5 * half <= closed.sized(0.5)["requests"] <= 1.5 * 5 / 0.5 * half
    # Never fewer than were asked for.
    assert closed.sized(60.0) == {"requests": 128}
    # These come within ten seconds.
    assert (clocked.trial, clocked.round["requests"]) == (None, 128)


def test_a_file_of_prompts_comes_by_the_clock_and_ends_where_the_model_ends_it(run, tmp_path):
    prompts = tmp_path / "gsm8k.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": "-"}) + "\n" for n in range(9)))
    arguments = ["--prompts", str(prompts), "--concurrency", "0", "--request-rate", "12"]
    _, _, ((jobs, (one,), *_),) = run([*CASE, *arguments])
    load = one.round["load"]
    assert (load["prompts"], load["chat"]) == ([f"{n} + 1?" for n in range(9)], True)
    client = options_of(one.round)
    # Ten seconds of them.
    assert (client["request-rate"], client["num-prompts"]) == ("12.0", "120")
    assert {"max-concurrency", "ignore-eos"} & set(client) == set()
    # Nobody has counted these tokens, nor bounded the requests: the model and vLLM say how many.
    assert {"max_model_len", "max_num_seqs"} & set(jobs["stock"].options) == set()


@pytest.mark.parametrize(("memory", "fits"), [(80, False), (141, True)])
def test_engines_start_alone_where_their_caches_do_not_fit_together(run, memory, fits):
    """An H100 holds no two caches of 256 requests, an H200 does."""
    host = dataclasses.replace(GPU, memory=memory << 30)
    arguments = ["--shape", "0.6b", "--method", "eagle3", "--k", "3", "--concurrency", "256", "--side", "mrv2-patched"]
    sizes = ["--input-len", "576", "--output-len", "288", "--range-ratio", "0.7777", "--side", "mrv2"]
    _, _, ((jobs, *_, at_once),) = run([*arguments, *sizes], host)
    assert at_once == fits
    assert ("kv_cache_memory_bytes" in jobs["mrv2"].options) == fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CASE, "--model", "M"], "only for --shape tiny"),
        (["--target", "T", "--method", "eagle3"], "eagle3 needs a drafter"),
        (["--url", "http://127.0.0.1:9", *CASE], "running server decides it"),
        ([*CASE, "--no-http", "--api-server-count", "2"], "--no-http starts no API server"),
        ([*CASE[:-1], "p-eagle", "--side", "mrv2"], "Model Runner V2 runs p-eagle in no supported vLLM"),
    ],
)
def test_bad_options_start_nothing(run, arguments, message):
    result, found, asked = run(arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert (found, asked) == (None, [])
