# SPDX-License-Identifier: Apache-2.0
"""Child processes that end well, die in a trial, or die outside of one, and the verdicts on what they answer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_hwplugin_lab.probe import Job, ProbeError, judge, probe

TRIALS = (("plain", "causal"), ("sinks", "yes"), ("alibi", "yes"))


def run(*, dies=(), own=False, declared="yes", behaviour="works", strict=False, job=None):
    """A probe whose children die in the trials of ``dies``; the report, and how much each child found done."""
    heard, done = [], []

    def child(module, text, environment, *, timeout, patience, on_event):
        job = Job(**json.loads(text))
        done.append(len(job.done))
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
        return SimpleNamespace(error="exit code 1" if "the end" in dies else None, log_tail="no backend 'X'")

    report = probe(job or Job(seed=4), strict=strict, on_result=heard.append, run=child)
    assert heard == report["results"]
    assert len(report["backends"]) == 1
    return report, done


def failures(report):
    return [one for one in report["results"] if one["fails"]]


def test_a_trial_in_which_the_child_dies_has_crashed_and_the_next_child_goes_on():
    report, done = run(dies=("sinks",))
    assert [(one["capability"], one["behaviour"]) for one in report["results"]] == [
        ("plain", "works"),
        ("sinks", "crashes"),
        ("alibi", "works"),
    ]
    (crashed,) = failures(report)
    assert (crashed["verdict"], crashed["shape"]) == ("crashes", "of sinks")
    assert crashed["detail"] == "killed by SIGSEGV: Fatal Python error"
    assert done == [0, 2]
    assert run(dies=("sinks",), declared="no", behaviour="refuses")[0]["ok"]


def test_a_child_that_dies_outside_of_any_trial_is_an_error():
    with pytest.raises(ProbeError, match=r"exit code 1; .*\nno backend 'X'"):
        run(dies=("the end",))


def test_what_works_undeclared_fails_for_the_plugins_own_backends_and_with_strict():
    assert run(declared="no")[0]["ok"]
    assert len(failures(run(declared="no", own=True)[0])) == len(TRIALS)
    assert len(failures(run(declared="no", strict=True)[0])) == len(TRIALS)


@pytest.mark.parametrize(
    ("behaviour", "verdicts"),
    [
        ("works", ("holds", "works-undeclared", "holds")),
        ("refuses", ("!refused-though-declared", "refused", "refused")),
        ("wrong", ("!wrong", "undeclared, and wrong", "!wrong")),
        ("crashes", ("!crashes", "undeclared, and crashes", "!crashes")),
        ("error", ("!error", "!error", "!error")),
    ],
)
def test_the_verdict_where_it_is_declared_where_not_and_where_nobody_asks(behaviour, verdicts):
    for declared, verdict in zip(("yes", "no", "unasked"), verdicts, strict=True):
        told = verdict.removeprefix("!"), verdict.startswith("!")
        assert judge(declared, behaviour, strict=False) == told
        # Strict changes what works undeclared and nothing else.
        assert judge(declared, behaviour, strict=True) == (told[0], told[1] or verdict == "works-undeclared")
