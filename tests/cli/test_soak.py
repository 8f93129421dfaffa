"""The command ``bench soak`` with the engines replaced."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vllm_hwplugin import bench
from vllm_hwplugin.bench._launch import Ended
from vllm_hwplugin.bench.soak import SoakJob
from vllm_hwplugin.cli import _soak
from vllm_hwplugin.cli._app import app

GPU = bench.Host("cuda", "NVIDIA H200", "580", "0.26.0", "2.11.0", "3.12.3", 16)
READY = {"event": "ready", "seconds": 1.0, "pid": 7, "platform": "a.B", "graph_modes": {"drafter": "FULL"}}


def soaked(job, **changes):
    return {
        "event": "soaked",
        "seconds": 2.0,
        "requests": 2,
        "tokens": 4,
        "drafts": 20_000,
        "accepted_per_position": [16_000, 8_000],
        "steps": job.steps,
        "batch_sizes": {"1": 30, "4": 30},
        "mixed_steps": 3,
        "draft_phases": 60,
        "draft_phases_in_graphs": 59,
        "graph_replays": {"target": 58, "draft": 57},
        # The second text is each side's own.
        "texts": [[0, [1], [2, 3]], [1, [4], [5, 6 if job.label == "stock" else 7]]],
        **changes,
    }


def ended(*events, error=None):
    return Ended(events, 3.0, error, "the log [of it]" if error else "", ())


def answer(job):
    if job.steps:
        return ended(READY, {"event": "progress", "steps": 30}, soaked(job), {"event": "done"})
    return ended(READY, {"event": "judged", "gaps": [[0.0] * len(t.tokens) for t in job.texts]}, {"event": "done"})


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*arguments, child=answer):
        jobs = []

        def run_child(module, job, environment, *, timeout, on_event, under):
            jobs.append((SoakJob.from_json(job), under))
            assert module == "vllm_hwplugin.bench._soak_engine"
            assert environment == jobs[-1][0].environment
            one = child(jobs[-1][0])
            for event in one.events:
                on_event(event)
            return one

        monkeypatch.setattr(_soak, "run_child", run_child)
        monkeypatch.setattr(bench, "detect_host", lambda: GPU)
        monkeypatch.setenv("COLUMNS", "200")
        file = tmp_path / "soak.json"
        command = ["bench", "soak", "--steps", "60", "--max-num-seqs", "4", "--json", str(file), *arguments]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        return result, json.loads(file.read_text()) if file.exists() else None, jobs

    return call


def test_both_sides_soak_and_a_third_engine_reads_each_different_text_once(run):
    result, found, jobs = run()
    assert result.exit_code == 0, result.output
    assert [job.label for job, _ in jobs] == ["stock", "patched", "judge"]
    assert [t.tokens for t in jobs[2][0].texts] == [(2, 3), (5, 6), (5, 7)]
    assert (found["ok"], found["failures"]) == (True, [])
    assert found["settings"]["k"] == 7
    patched = found["sides"]["patched"]
    assert patched["acceptance_per_position"] == [0.8, 0.4]
    assert patched["texts"] == {"count": 2, "worst_gap": 0.0, "not_first_choice": 0.0}
    assert patched["platform"] == "a.B"
    assert "60 steps, 2 requests, 4 tokens" in result.output
    assert "60 phases, 59 of them in graphs" in result.output


def test_standard_output_can_be_the_results_alone(run):
    result, found, _ = run("--json", "-")
    assert list(json.loads(result.stdout)["sides"]) == ["stock", "patched"]
    assert "60 phases, 59 of them in graphs" in result.stderr
    assert found is None


def test_a_memory_checker_runs_the_load_and_not_the_judge(run):
    _, found, jobs = run("--side", "patched", "--under", "env --error-exitcode 99", "--method", "eagle3")
    assert [(job.label, under) for job, under in jobs] == [
        ("patched", ("env", "--error-exitcode", "99")),
        ("judge", ()),
    ]
    assert jobs[0][0].options["speculative_config"]["num_speculative_tokens"] == 3
    assert found["settings"]["under"] == ["env", "--error-exitcode", "99"]


def test_a_crash_is_a_failure_with_its_log_and_the_other_side_is_judged(run):
    def child(job):
        return ended(READY, error="exit code 99") if job.label == "patched" else answer(job)

    result, found, jobs = run(child=child)
    assert result.exit_code == 1
    assert [job.label for job, _ in jobs] == ["stock", "patched", "judge"]
    assert found["failures"] == ["patched: exit code 99"]
    assert "the log [of it]" in result.output
    assert found["sides"]["stock"]["texts"]["worst_gap"] == 0.0


def test_a_text_that_is_not_greedy_is_a_failure(run):
    def child(job):
        if job.steps:
            return answer(job)
        return ended(READY, {"event": "judged", "gaps": [[0.0, 0.0], [0.0, 0.0], [0.0, 3.5]]}, {"event": "done"})

    result, found, _ = run(child=child)
    assert result.exit_code == 1
    assert found["ok"] is False
    assert "does not hold: patched: a token is 3.5000 nats below" in result.output


def test_texts_that_nobody_read_are_a_failure(run):
    def child(job):
        return answer(job) if job.steps else ended(error="killed by SIGKILL")

    result, found, _ = run(child=child)
    assert result.exit_code == 2
    assert "judge: killed by SIGKILL" in found["failures"]
    assert "patched: its texts were not judged" in found["failures"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "ngram"], "choose from eagle3, dflash"),
        (["--side", "mrv2"], "choose from stock, patched"),
        (["--patched-env", "A"], "is not KEY=VAL"),
        (["--under", "no-such-checker --leak"], "no command 'no-such-checker' on PATH"),
    ],
)
def test_bad_options_start_nothing(run, arguments, message):
    result, found, jobs = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert (found, jobs) == (None, [])
