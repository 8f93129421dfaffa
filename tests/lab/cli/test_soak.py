"""The command ``bench soak`` with the engines replaced."""

from __future__ import annotations

import json

import pytest

from tests.program import program
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench._launch import Ended
from vllm_hwplugin_lab.bench.soak import Soaked, Text
from vllm_hwplugin_lab.cli import _soak

ALL = ["stock", "patched", "mrv2", "mrv2-patched"]
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
        "steps": 60,
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
    record = {
        "role": "parent",
        "fingerprint": "f00d",
        "error": None,
        "notes": [],
        "decisions": {},
        "features": {"nwor": {"state": "live", "reason": ""}, "other": {"state": "refused", "reason": "drifted"}},
        "uses": {"v1-draft-phase": {"used": True, "reason": ""}, "nwor": {"used": False, "reason": "no drafts"}},
    }
    return Ended(events, 3.0, error, "the log [of it]" if error else "", (record,))


def answer(job):
    return ended(READY, {"event": "progress", "steps": 30}, soaked(job), {"event": "done"})


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*arguments, child=answer, judge=None, host=GPU):
        asked = []

        def run_soak(jobs, judging, load, *, at_once, timeout, under, on_event):
            asked.append((jobs, judging, load, at_once, under))
            found = Soaked({side: child(job) for side, job in jobs.items()})
            for side, one in found.ended.items():
                for event in one.events:
                    on_event(side, event)
                if one.error is None:
                    found.texts[side] = [Text(*map(tuple, text)) for _, *text in one.events[-2]["texts"]]
            found.ended["judge"] = judge or ended(READY, {"event": "done"})
            if found.ended["judge"].error is None:
                found.gaps = {text: [0.0, 0.0] for several in found.texts.values() for text in several}
            return found

        monkeypatch.setattr(_soak, "run_soak", run_soak)
        monkeypatch.setattr(bench, "detect_host", lambda: host)
        monkeypatch.setenv("COLUMNS", "200")
        file = tmp_path / "soak.json"
        command = ["bench", "soak", "--steps", "60", "--max-num-seqs", "4", "--json", str(file), *arguments]
        result = program(*command)
        return result, json.loads(file.read_text()) if file.exists() else None, asked

    return call


def test_all_sides_that_the_host_can_run_soak_at_the_same_time(run):
    result, found, ((jobs, judge, _, at_once, _),) = run()
    assert result.exit_code == 0, result.output
    assert (list(jobs), judge.label, at_once) == (ALL, "judge", True)
    runners = {side: job.environment["VLLM_USE_V2_MODEL_RUNNER"] for side, job in jobs.items()}
    assert runners == {"stock": "0", "patched": "0", "mrv2": "1", "mrv2-patched": "1"}
    assert sum(job.options["gpu_memory_utilization"] for job in (*jobs.values(), judge)) == pytest.approx(0.9)
    assert (found["ok"], found["failures"]) == (True, [])
    assert found["settings"]["k"] == 7
    patched = found["sides"]["patched"]
    assert patched["acceptance_per_position"] == [0.8, 0.4]
    assert patched["texts"] == {"count": 2, "worst_gap": 0.0, "not_first_choice": 0.0}
    assert (patched["platform"], patched["features"]) == ("a.B", ["v1-draft-phase"])
    assert "V2 patched: 60 steps, 2 requests, 4 tokens" in result.output
    assert "60 phases, 59 of them in graphs; graphs replayed: target 58, draft 57" in result.output


def test_a_crash_is_a_failure_with_its_log_and_the_other_sides_are_judged(run):
    def child(job):
        return ended(READY, error="exit code 99") if job.label == "mrv2-patched" else answer(job)

    result, found, _ = run(child=child)
    assert result.exit_code == 1
    assert found["failures"] == ["mrv2-patched: exit code 99"]
    assert "the log [of it]" in result.output
    assert found["sides"]["mrv2"]["texts"]["worst_gap"] == 0.0


def test_each_runner_is_held_to_its_own_stock(run):
    def child(job):
        worse = [16_000, 7_500] if job.label == "mrv2-patched" else [16_000, 8_000]
        return ended(READY, soaked(job, accepted_per_position=worse), {"event": "done"})

    result, found, _ = run(child=child)
    assert result.exit_code == 1
    assert found["failures"] == [
        "mrv2-patched: acceptance at position 1: unpatched 0.4000, patched 0.3750; expected at most 0.01 less"
    ]
