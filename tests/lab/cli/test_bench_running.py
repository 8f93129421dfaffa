"""``bench serve --url`` and ``--against``, on HTTP servers that say what vLLM's says; vLLM's client is left out."""

from __future__ import annotations

import json

import pytest

from tests.lab.vllm_server import Stand, serving
from tests.program import program
from vllm_hwplugin_lab.bench import Outcome, _server, running
from vllm_hwplugin_lab.cli import _sides

pytest.importorskip("numpy")
pytest.importorskip("prometheus_client")

LOAD = ["--concurrency", "1", "--concurrency", "4", "--num-prompts", "12", "--input-len", "8", "--output-len", "5"]


@pytest.fixture
def run(monkeypatch):
    """Run the command: what it did, and how many requests each round of each load had."""

    def call(stand, *arguments):
        sizes = []

        def run_load(server, model, load):
            # As many answers as vLLM's client would have, which takes them at the speed of the stand.
            stand.requests += load["requests"]
            gaps = [stand.seconds] * 4
            if not stand.answers:
                silent = {"prompt_tokens": 8, "tokens": 0, "start": 0.0, "ttft": None, "gaps": []}
                return {"began": 0.0, "seconds": 1.0, "requests": [silent] * load["requests"]}
            request = {"prompt_tokens": 8, "tokens": 5, "start": 0.0, "ttft": stand.seconds, "gaps": gaps}
            return {"began": 0.0, "seconds": stand.seconds * load["requests"], "requests": [request] * load["requests"]}

        def in_turn(jobs, measurements, *, rounds: int, keep, **_):
            ((side, job),) = jobs.items()
            server = _server.RunningServer(job.options["url"])
            server.wait()
            events = [{"event": "ready", **server.facts()}]
            for _ in range(rounds):
                for one in measurements:
                    load = {**one.round["load"], "requests": one.round["requests"]}
                    sizes.append((one.name, load["requests"]))
                    found = _server.measure(server, job.options["model"], load)
                    # Rounds are as quick as each other, so what is left is the difference of two runs.
                    events.append({"event": "loaded", "workload": one.name, **found, "host_us": 500.0})
            events.append({"event": "said", **server.said()})
            outcomes = {side: Outcome(job, tuple(events), 1.0)}
            keep(outcomes)
            return outcomes

        monkeypatch.setattr(_server, "run_load", run_load)
        monkeypatch.setattr(_server, "_COUNTED", 0.0)
        monkeypatch.setattr(_server._gpu_samples, "of_server", lambda *_: [0.25, 0.75])
        monkeypatch.setattr(_sides, "measure_in_turn", in_turn)
        monkeypatch.setenv("COLUMNS", "200")
        with serving(stand):
            return program("bench", "serve", "--url", f"{stand.url}/v1/", *arguments), sizes

    return call


@pytest.mark.parametrize(
    ("stand", "said"),
    [
        (
            Stand(plugin={"served": 75, "prompt": 25}, cpu=0.005),
            {
                "vllm": "0.31.0",
                "prefix_caching": False,
                "drafted": 3,
                # Of the run alone, two rounds of two loads of 12: not what the server had counted before.
                "plugin": {"v2-tail-graph drafting": {"prompt": 25 * 48, "served": 75 * 48}},
            },
        ),
        (Stand(), {"vllm": "0.31.0", "prefix_caching": False, "drafted": 3, "plugin": None}),
        (
            Stand(version=None, drafted=None),
            {"vllm": None, "prefix_caching": False, "drafted": 0, "plugin": None},
        ),
    ],
)
def test_results_hold_what_was_sent_and_what_the_server_says(run, tmp_path, stand, said):
    stand.seconds = 0.01
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    result, _ = run(stand, *LOAD, "--json", str(file), "--html", str(page))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    ((side, entry),) = found["cases"][0]["sides"].items()
    assert (side, entry["said"], entry["error"]) == ("server", said, None)
    settings = {"url": stand.url, "model": "chat", "checkpoint": "/models/llama", "concurrency": [1, 4], "rounds": 2}
    assert found["settings"].items() >= settings.items()
    assert found["client"].keys() >= {"vllm", "vllm-hwplugin"}
    load = entry["loads"]["4 at once, temperature 0"]
    assert load["cpu"].get("server") == (None if stand.cpu is None else pytest.approx(0.5))
    assert (load["requests"], load["drafts"], load["gpu_busy"]) == (24, 24 if said["drafted"] else 0, 0.5)
    shown = page.read_text()
    assert ["on, served 75%" in text for text in (result.output, shown)] == [said["plugin"] is not None] * 2
    assert "<title>No verdict" in shown


@pytest.mark.parametrize(
    ("before", "after", "outcome", "status"),
    [(0.02, 0.01, "is faster", 0), (0.01, 0.01, "as fast as", 0), (0.01, 0.02, "is slower", 1)],
)
def test_two_runs_of_one_load_are_compared(run, tmp_path, before, after, outcome, status):
    files, page = [tmp_path / name for name in ("before.json", "after.json")], tmp_path / "both.html"
    # What runs again is what is compared, whatever it was started by.
    run(Stand(seconds=before), *LOAD, "--json", str(files[0]))
    # As of a run whose trial said how many requests take some seconds.
    found = running.read_run(files[0])
    found["cases"][0]["sides"]["server"]["loads"]["4 at once, temperature 0"]["requests"] = 2 * 15
    files[0].write_text(json.dumps(found))
    against = ["--against", str(files[0]), "--json", str(files[1]), "--html", str(page)]
    result, sizes = run(Stand(seconds=after, plugin={"served": 9, "prompt": 1}), *against)
    assert result.exit_code == status, result.output
    # Options that are left out are those of the run before, and so is the size of a round.
    assert sizes == [("1 at once, temperature 0", 12), ("4 at once, temperature 0", 15)] * 2
    shown = page.read_text()
    for words in (outcome, f"{before / after:.2f}×", "served 90%"):
        assert [words in text for text in (shown, result.output)] == [True, True], words
    # The file is one of a run, so that the next one can be compared with it; and two files do without a server.
    again = program("bench", "serve", "--against", str(files[0]), "--against", str(files[1]))
    assert (again.exit_code, outcome in again.output) == (status, True)


def test_a_server_that_answers_nothing_is_compared_with_nothing(run, tmp_path):
    files = [tmp_path / name for name in ("before.json", "after.json")]
    run(Stand(seconds=0.01), *LOAD, "--json", str(files[0]))
    result, _ = run(Stand(answers=False), "--against", str(files[0]), "--json", str(files[1]))
    assert (result.exit_code, "No verdict" in result.output) == (2, True), result.output
    again = program("bench", "serve", "--against", str(files[1]), "--against", str(files[0]))
    assert (again.exit_code, "No verdict" in again.output) == (2, True)


def test_another_load_is_refused_by_name_and_sends_nothing(run, tmp_path):
    file, prompts = tmp_path / "before.json", tmp_path / "p.jsonl"
    run(Stand(seconds=0.01), *LOAD, "--json", str(file))
    for other, key in (
        (["--concurrency", "2"], "concurrency: [1, 4] before, [2] after"),
        (["--output-len", "6"], "output_len: 5 before, 6 after"),
        (["--rounds", "3"], "rounds: 2 before, 3 after"),
        (["--", "--burstiness", "0.5"], "client: [] before, ['--burstiness', '0.5'] after"),
        (["--prompts", str(prompts)], "prompts_sha256: None before, "),
    ):
        prompts.write_text('{"prompt": "p"}\n')
        result, sizes = run(Stand(seconds=0.01), "--against", str(file), *other)
        assert (result.exit_code, sizes) == (2, [])
        assert f"not the same load: {key}" in result.output
    found = json.loads(file.read_text())
    found["settings"]["checkpoint"] = "/models/other"
    file.write_text(json.dumps(found))
    result, _ = run(Stand(seconds=0.01), "--against", str(file))
    assert "checkpoint: '/models/other' before, '/models/llama' after" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: expected"),
        (["--against", "FILE"], "expected one file with --url, or two"),
        (["--against", "FILE", "--against", "FILE", "--against", "FILE"], "expected one file with --url, or two"),
        (["--against", "FILE", "--against", "FILE"], "expected results of `bench serve --url`"),
        (["--against", "FILE", "--against", "FILE", "--method", "mtp"], "running server decides it"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, arguments, message):
    file = tmp_path / "engines.json"
    file.write_text('{"format": "serve 2"}')
    result = program("bench", "serve", *(str(file) if word == "FILE" else word for word in arguments))
    assert (result.exit_code, message in result.output) == (2, True), result.output
