from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import Job, Outcome, Workload, acceptance_length

WORKLOAD = Workload("w", ((1, 2), (3,)), max_tokens=8, batch=2, rounds=2, profile_tokens=4, keep_texts=True)
JOB = Job("tiny", True, {"model": "m"}, {"A": "1"}, (WORKLOAD,), tokenize=False)


def measured(number, seconds, tokens, drafts, accepted, **more):
    return {
        "event": "measured",
        "workload": "w",
        "round": number,
        "seconds": seconds,
        "tokens": tokens,
        "steps": drafts + 1,
        "drafts": drafts,
        "accepted_per_position": accepted,
        **more,
    }


def test_a_job_survives_its_json():
    assert Job.from_json(JOB.to_json()) == JOB


def test_measurements_count_rounds_and_the_profile():
    assert JOB.measurements == 3


def test_the_summary_of_several_rounds():
    events = (
        {"event": "ready", "seconds": 3.0},
        measured(0, 2.0, 100, 9, [6, 3], texts=[[1], [2]]),
        measured(1, 1.0, 100, 11, [9, 6]),
        {"event": "profiled", "workload": "w", "steps": 5, "graph_launches": 1},
    )
    outcome = Outcome(JOB, events, 9.0)
    row = outcome.summary("w")
    assert row["tokens_per_second"] == {"best": 100.0, "median": 75.0, "all": [50.0, 100.0]}
    assert row["step_ms"] == pytest.approx(3000 / 22)
    assert row["acceptance_per_position"] == [15 / 20, 9 / 20]
    assert row["acceptance_length"] == pytest.approx(1 + 24 / 20)
    assert row["profile"] == {"steps": 5, "graph_launches": 1}
    assert outcome.texts("w") == [[1], [2]]
    assert outcome.ready()["seconds"] == 3.0


def test_what_was_not_measured_is_none():
    outcome = Outcome(JOB, (), 1.0, error="exit code 1")
    assert outcome.summary("w") is None
    assert outcome.texts("w") is None
    assert outcome.ready() == {}


def test_without_drafts_there_is_no_acceptance():
    assert acceptance_length(0, []) is None
    row = Outcome(JOB, (measured(0, 1.0, 10, 0, []),), 1.0).summary("w")
    assert row["acceptance_length"] is None
    assert row["acceptance_per_position"] == []
