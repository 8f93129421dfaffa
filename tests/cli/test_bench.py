"""The command ``bench`` with the engines replaced."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from vllm_hwplugin.bench import Host, Outcome
from vllm_hwplugin.cli import _bench
from vllm_hwplugin.cli._app import app

from .conftest import recording_launch

GPU = Host("cuda", "NVIDIA H200", "580", "0.26.0", "2.11.0", "3.12.3", 16)


def answer(job):
    events = [{"event": "ready", "seconds": 1.0, "graph_modes": {}}]
    for workload in job.workloads:
        for number in range(workload.rounds):
            speed = 150 if job.patched else 100
            events.append(
                {
                    "event": "measured",
                    "workload": workload.name,
                    "round": number,
                    "seconds": 1.0,
                    "tokens": speed,
                    "steps": 10,
                    "drafts": 10,
                    "accepted_per_position": [9, 6],
                }
            )
    return Outcome(job, tuple(events), 2.0)


@pytest.fixture
def run(monkeypatch, tmp_path):
    file = tmp_path / "r.json"

    def call(arguments, launch=answer, host=GPU):
        jobs = []
        monkeypatch.setattr(_bench, "launch", recording_launch(launch, jobs))
        monkeypatch.setattr(_bench, "detect_host", lambda: host)
        monkeypatch.setenv("COLUMNS", "200")
        result = CliRunner().invoke(app, ["bench", "--json", str(file), *arguments], catch_exceptions=False)
        return result, json.loads(file.read_text()) if file.exists() else None, jobs

    call.file = file
    return call


def test_stock_and_patched_in_turn_for_each_case(run):
    result, found, jobs = run(["--shape", "0.6b", "--shape", "tiny", "--k", "2", "--k", "3", "--batch", "4"])
    assert result.exit_code == 0, result.output
    assert [j.label for j in jobs] == [
        f"{shape} eagle3 k={k} {side}" for shape in ("0.6b", "tiny") for k in (2, 3) for side in ("stock", "patched")
    ]
    assert [(c["shape"], c["k"]) for c in found["cases"]] == [("0.6b", 2), ("0.6b", 3), ("tiny", 2), ("tiny", 3)]
    assert "1.50" in result.output


def test_the_third_side_follows_stock_and_patched(run):
    result, found, jobs = run(["--shape", "8b", "--method", "dflash", "--k", "7", "--mrv2"])
    assert result.exit_code == 0, result.output
    assert [j.label for j in jobs] == [f"8b dflash k=7 {side}" for side in ("stock", "patched", "mrv2")]
    assert list(found["cases"][0]["sides"]) == ["stock", "patched", "mrv2"]
    assert "MRV2" in result.output


def test_a_vllm_whose_other_runner_lacks_the_method_is_refused(run):
    host = dataclasses.replace(GPU, vllm="0.20.2")
    result, _, jobs = run(["--shape", "8b", "--method", "dflash", "--mrv2"], host=host)
    assert result.exit_code == 2
    assert "--mrv2 cannot measure dflash on vLLM 0.20.2" in result.output
    assert jobs == []


def test_one_engine_measures_all_batch_sizes(run):
    _, found, jobs = run(["--shape", "8b", "--rounds", "2", "--profile-tokens", "0"])
    assert len(jobs) == 2
    assert [(w.batch, w.rounds, w.profile_tokens) for w in jobs[0].workloads] == [(1, 2, 0), (8, 2, 0), (32, 2, 0)]
    assert jobs[0].options["max_num_seqs"] == 32
    assert list(found["cases"][0]["sides"]["stock"]["batches"]) == ["1", "8", "32"]


def test_environments_for_both_sides_and_for_one(run):
    options = ["--vllm-env", "A=1=2", "--patched-env", "B=", "--cudagraph-mode", "FULL_AND_PIECEWISE"]
    _, found, jobs = run(["--shape", "0.6b", *options])
    assert [(j.environment.get("A"), j.environment.get("B")) for j in jobs] == [("1=2", None), ("1=2", "")]
    assert jobs[0].options["compilation_config"] == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    assert found["settings"]["vllm_environment"] == {"A": "1=2"}


def test_a_crash_of_one_side_is_in_the_results_and_the_rest_is_measured(run):
    def launch(job):
        return Outcome(job, (), 1.0, "killed by SIGSEGV", "last words [of it]") if job.patched else answer(job)

    result, found, jobs = run(["--shape", "0.6b", "--shape", "8b"], launch)
    assert result.exit_code == 1
    assert len(jobs) == 4
    assert "0.6b eagle3 k=3 patched failed: killed by SIGSEGV" in result.output
    assert "last words [of it]" in result.output
    assert [c["sides"]["patched"]["error"] for c in found["cases"]] == ["killed by SIGSEGV"] * 2
    assert found["cases"][1]["sides"]["stock"]["batches"]["8"]["tokens_per_second"]["best"] == 100


def test_standard_output_can_be_the_results_alone(run):
    result, found, _ = run(["--shape", "0.6b", "--json", "-"])
    assert [case["shape"] for case in json.loads(result.stdout)["cases"]] == ["0.6b"]
    assert "NVIDIA H200" in result.stderr
    assert found is None


def test_a_crash_of_stock_says_nothing_of_the_plugin(run):
    def launch(job):
        return answer(job) if job.patched else Outcome(job, (), 1.0, "killed by SIGSEGV", "")

    assert run(["--shape", "0.6b"], launch)[0].exit_code == 2


def test_what_was_measured_is_in_the_file_before_the_next_engine_starts(run):
    def launch(job):
        if job.patched:
            raise KeyboardInterrupt
        return answer(job)

    result, found, _ = run(["--shape", "0.6b"], launch)
    assert result.exit_code != 0
    assert list(found["cases"][0]["sides"]) == ["stock"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "9b"], "choose from tiny, 0.6b, 8b"),
        (["--method", "ngram"], "choose from eagle3, dflash"),
        (["--vllm-env", "A"], "is not KEY=VAL"),
        (["--batch", "97"], "holds 96 prompts, 97 were asked for"),
    ],
)
def test_bad_options_start_nothing(run, arguments, message):
    result, found, jobs = run(arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert (found, jobs) == (None, [])


def test_dummy_shapes_on_a_cpu_are_refused(run):
    host = Host("cpu", "Some CPU", None, "0.32.0", "2.13.0", "3.11.7", 2)
    result, _, jobs = run(["--shape", "0.6b"], host=host)
    assert result.exit_code == 2
    assert "needs a GPU" in result.output
    assert jobs == []
