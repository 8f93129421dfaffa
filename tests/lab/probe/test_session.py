# SPDX-License-Identifier: Apache-2.0
"""Child processes that end well, die in a trial, or die outside of one, and the verdicts on what they answer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_hwplugin_lab.probe import Job, ProbeError, judge, probe

TRIALS = (("plain", "causal"), ("sinks", "yes"), ("alibi", "yes"))
WHERE = ("yes", "no", "unasked")


def child(*, dies=(), own=False, declared="yes", behaviour="works", jobs=None):
    """A stand-in for starting a child; it dies in the trials of ``dies``."""

    def run(module, text, environment, *, timeout, patience, on_event):
        job = Job(**json.loads(text))
        if jobs is not None:
            jobs.append(job)
        on_event({"event": "host", "device": "cpu", "name": "x", "torch": "2", "vllm": "0.32.0"})
        on_event({"event": "backend", "name": "B", "path": "a.B", "own": own, "left_out": None})
        for capability, value in TRIALS:
            labels = {"backend": "B", "capability": capability, "value": value}
            if list(labels.values()) in job.done:
                continue
            on_event({"event": "trial", **labels})
            on_event({"event": "case", "shape": f"of {capability}", "declared": declared})
            if capability in dies:
                return SimpleNamespace(error="killed by SIGSEGV", log_tail="first\nFatal Python error\n")
            facts = {"behaviour": behaviour, "cases": 5, "shape": "s", "detail": "d", "ratio": 0.8}
            on_event({"event": "result", **labels, "declared": declared, **facts})
        return SimpleNamespace(error=None, log_tail="")

    return run


def run(start, strict=False, job=None):
    heard = []
    report = probe(job or Job(seed=4), strict=strict, on_result=heard.append, run=start)
    assert heard == report.results
    return report


def test_a_child_that_ends_well():
    report = run(child())
    assert [(one["capability"], one["value"]) for one in report.results] == list(TRIALS)
    assert not report.failures
    assert report.host["vllm"] == "0.32.0"
    assert report.to_dict()["ok"] is True


def test_a_trial_in_which_the_child_dies_has_crashed_and_the_next_child_goes_on():
    jobs = []
    report = run(child(dies=("sinks",), jobs=jobs))
    assert [one["behaviour"] for one in report.results] == ["works", "crashes", "works"]
    crashed = report.failures[0]
    assert (crashed["verdict"], crashed["shape"]) == ("crashes", "of sinks")
    assert crashed["detail"] == "killed by SIGSEGV: Fatal Python error"
    assert [len(job.done) for job in jobs] == [0, 2]
    assert len(report.backends) == 1


def test_a_crash_on_what_was_not_declared_does_not_fail():
    report = run(child(dies=("sinks", "alibi"), declared="no", behaviour="refuses"))
    assert [one["verdict"] for one in report.results][1:] == ["undeclared, and crashes"] * 2
    assert report.results[1]["declared"] == "no"
    assert not report.failures


def test_a_child_that_dies_outside_of_any_trial_is_an_error():
    def start(*_, **__):
        return SimpleNamespace(error="exit code 1", log_tail="no backend 'X' on this host")

    with pytest.raises(ProbeError, match=r"exit code 1; .*`vllm-hwplugin doctor` says .*\nno backend 'X'"):
        run(start)


def test_what_works_undeclared_fails_for_the_plugins_own_backends_and_with_strict():
    assert not run(child(declared="no")).failures
    assert len(run(child(declared="no", own=True)).failures) == len(TRIALS)
    assert len(run(child(declared="no"), strict=True).failures) == len(TRIALS)


def test_the_results_file_holds_the_settings_and_every_verdict():
    data = run(child(behaviour="wrong"), job=Job(backends=("B",), seed=7, cases=2)).to_dict()
    assert (data["format"], data["ok"]) == (1, False)
    assert (data["settings"]["seed"], data["settings"]["cases"]) == (7, 2)
    assert "done" not in data["settings"]
    assert {one["verdict"] for one in data["results"]} == {"wrong"}
    assert all(one["fails"] for one in data["results"])
    assert data["backends"][0]["path"] == "a.B"


@pytest.mark.parametrize(
    ("behaviour", "fails"),
    [
        ("works", (False, False, False)),
        ("refuses", (True, False, False)),
        ("wrong", (True, False, True)),
        ("crashes", (True, False, True)),
        ("error", (True, True, True)),
    ],
)
def test_which_behaviours_fail_where_declared_where_not_and_where_nobody_asks(behaviour, fails):
    assert tuple(judge(declared, behaviour, strict=False)[1] for declared in WHERE) == fails
    # Strict changes what works undeclared and nothing else.
    strict = (False, True, False) if behaviour == "works" else fails
    assert tuple(judge(declared, behaviour, strict=True)[1] for declared in WHERE) == strict


def test_what_works_is_told_from_what_is_declared():
    assert [judge(declared, "works", strict=False)[0] for declared in WHERE] == ["holds", "works-undeclared", "holds"]
    assert judge("yes", "refuses", strict=False)[0] == "refused-though-declared"
    assert judge("no", "wrong", strict=False)[0] == "undeclared, and wrong"
