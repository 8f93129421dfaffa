from __future__ import annotations

from vllm_hwplugin_lab.bench import Job, Outcome, Workload, acceptance_length

WORKLOAD = Workload("w", ((1, 2), (3,)), max_tokens=8, batch=2, rounds=2, profile_tokens=4, keep_texts=True)
JOB = Job("tiny", True, {"model": "m"}, {"A": "1"}, (WORKLOAD,), tokenize=False)


def test_a_job_survives_its_json():
    assert Job.from_json(JOB.to_json()) == JOB


def test_measurements_count_rounds_and_the_profile():
    assert JOB.measurements == 3


def test_what_was_not_measured_is_none():
    outcome = Outcome(JOB, (), 1.0, error="exit code 1")
    assert outcome.texts("w") is None
    assert outcome.ready() == {}


def test_the_first_rounds_texts_are_kept():
    events = tuple({"event": "measured", "workload": "w", **more} for more in ({"texts": [[1], [2]]}, {}))
    assert Outcome(JOB, events, 9.0).texts("w") == [[1], [2]]


def test_without_drafts_there_is_no_acceptance():
    assert acceptance_length(0, []) is None
