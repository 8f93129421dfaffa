"""The command ``demo`` with the engines replaced: what it asks for, compares, shows and exits with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.cli import demo as command

CPU = bench.Host("cpu", "Some CPU", None, "0.32.0", "2.13.0", "3.11.7", 2)
GPU = bench.Host("cuda", "NVIDIA H200", "580", "0.26.0", "2.11.0", "3.12.3", 16)
RECORD = {"pid": 77, "role": "parent", "features": {}, "uses": {}, "decisions": {}}


def answer(job, texts=((5, 6), (7, 8)), drafts=4):
    accepted = [3, 1] if "speculative_config" in job.options else []
    events = [
        {
            "event": "measured",
            "workload": command.WORKLOAD,
            "round": number,
            "seconds": 2.0 / (1 + number),
            "tokens": 4,
            "steps": 4,
            "host_us": 500.0,
            "drafts": drafts if accepted else 0,
            "accepted_per_position": accepted,
            **({"texts": [list(t) for t in texts]} if number == 0 else {}),
        }
        for number in range(2)
    ]
    ready = {"event": "ready", "seconds": 1.0, "graph_modes": {"drafter": "FULL"}, "platform": "a.Platform"}
    return bench.Outcome(job, (ready, *events), 3.0, records=(RECORD,) if job.patched else ())


def recording_launch(answer: Callable[[Any], Any], jobs: list[Any]) -> Callable[..., Any]:
    """A stand-in for `bench.launch` that notes each job, answers with `answer(job)` and passes its events on."""

    def launched(job: Any, *, timeout: float, on_event: Callable[[Any], None]) -> Any:
        jobs.append(job)
        outcome = answer(job)
        for event in outcome.events:
            on_event(event)
        return outcome

    return launched


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the demo on a host with a stand-in for `launch`; returns the result, the JSON and the jobs."""

    def call(launch=answer, host=CPU, arguments=()):
        jobs = []
        monkeypatch.setattr(bench, "launch", recording_launch(launch, jobs))
        monkeypatch.setattr(bench, "detect_host", lambda: host)
        monkeypatch.setenv("COLUMNS", "200")
        file = tmp_path / "demo.json"
        result = program("demo", "--prompts", "2", "--tokens", "2", "--json", str(file), *arguments)
        return result, json.loads(file.read_text()) if file.exists() else None, jobs

    return call


@pytest.mark.parametrize(
    ("failed", "code"),
    [({"DFlash patched"}, 1), ({"DFlash unpatched"}, 2), ({"DFlash unpatched", "DFlash patched"}, 2)],
)
def test_only_what_the_plugin_does_is_a_finding(run, failed, code):
    def launch(job):
        return bench.Outcome(job, (), 1.0, "exit code 1", "") if job.label in failed else answer(job)

    result, found, _ = run(launch)
    assert (result.exit_code, found["ok"]) == (code, False)


@pytest.mark.parametrize(("host", "code"), [(CPU, 1), (GPU, 0)])
def test_a_differing_text_fails_where_texts_must_be_equal(run, host, code):
    def launch(job):
        return answer(job, texts=((5, 6), (7, 9))) if job.label == "Eagle3 patched" else answer(job)

    result, found, _ = run(launch, host)
    assert found["configurations"][2]["texts_equal"] == 1
    assert result.exit_code == code
    assert "1/2" in result.output
