"""Children one after the other, until every cell has an outcome."""

from __future__ import annotations

import json

import pytest

from vllm_hwplugin_lab.bench._launch import Ended
from vllm_hwplugin_lab.bench.micro import _cells
from vllm_hwplugin_lab.bench.micro._supervise import ENVIRONMENT, MODULE, supervise

TODO = [("a", "1"), ("b", "1"), ("a", "2")]
READY = {"event": "ready", "copy_bandwidth": 4e12, "pid": 3}


class Children:
    """Each measures all its cells but dies of those of `deadly`."""

    def __init__(self, deadly=(), starts=True):
        self.deadly, self.starts, self.jobs = deadly, starts, []

    def __call__(self, module, text, environment, *, timeout, on_event):
        assert (module, environment) == (MODULE, ENVIRONMENT)
        self.jobs.append((json.loads(text), timeout))
        events = [READY] if self.starts else []
        for kernel, case in self.jobs[-1][0]["todo"] if self.starts else ():
            events.append({"event": "begin", "kernel": kernel, "case": case})
            if (kernel, case) in self.deadly:
                break
            events.append({"event": "cell", "outcome": _cells.outcome((kernel, case), _cells.MEASURED)})
        else:
            if self.starts:
                events += [{"event": "copies", "copies": [{"bytes": 2, "seconds": 1.0}]}, {"event": "done"}]
        for event in events:
            on_event(event)
        error = None if events[-1:] == [{"event": "done"}] else "killed by SIGSEGV"
        return Ended(tuple(events), 5.0, error, "its log" if error else "", ())


def test_one_child_measures_all_with_the_time_that_is_there():
    children, seen = Children(), []
    outcomes, processes = supervise({"kind": "ops"}, TODO, seconds=60, run=children, on_event=seen.append)
    assert [(o["kernel"], o["case"], o["status"], o["process"]) for o in outcomes] == [
        (*cell, _cells.MEASURED, 0) for cell in TODO
    ]
    ((job, timeout),) = children.jobs
    assert (job["kind"], job["todo"]) == ("ops", [list(cell) for cell in TODO])
    assert job["seconds"] == pytest.approx(60, abs=1)
    assert timeout > 60
    assert processes[0]["copy_bandwidth"] == 4e12
    assert processes[0]["copies"] == [{"bytes": 2, "seconds": 1.0}]
    assert seen[0] == READY


def test_another_child_goes_on_behind_the_cell_that_killed_the_first():
    children = Children(deadly=[TODO[1]])
    outcomes, processes = supervise({}, TODO, seconds=60, run=children)
    assert [(o["kernel"], o["status"], o["process"]) for o in outcomes] == [
        ("a", _cells.MEASURED, 0),
        ("b", _cells.CRASHED, 0),
        ("a", _cells.MEASURED, 1),
    ]
    assert [p["error"] for p in processes] == ["killed by SIGSEGV", None]
    assert processes[0]["log_tail"] == "its log"


def test_a_kernel_that_kills_twice_is_given_up():
    todo = [("a", str(i)) for i in range(5)]
    children = Children(deadly=todo)
    outcomes, _ = supervise({}, todo, seconds=60, run=children)
    assert len(children.jobs) == 2
    assert [o["status"] for o in outcomes] == [_cells.CRASHED, _cells.CRASHED, *[_cells.NOT_RUN] * 3]


def test_a_child_that_does_not_start_ends_the_run():
    children = Children(starts=False)
    outcomes, processes = supervise({}, TODO, seconds=60, run=children)
    assert len(children.jobs) == 1
    assert {o["reason"] for o in outcomes} == {"the process ended before it: killed by SIGSEGV"}
    assert processes[0]["error"] == "killed by SIGSEGV"


def test_no_child_is_started_when_the_time_is_used_up():
    ticks = iter([0.0, 0.0, 61.0])
    children = Children(deadly=[TODO[0]])
    outcomes, _ = supervise({}, TODO, seconds=60, run=children, clock=lambda: next(ticks))
    assert len(children.jobs) == 1
    assert [o["status"] for o in outcomes] == [_cells.CRASHED, _cells.NOT_RUN, _cells.NOT_RUN]
    assert outcomes[-1]["process"] is None


def test_the_rivals_are_stock():
    assert ENVIRONMENT["VLLM_HWPLUGIN"] == "0"


def test_what_was_measured_is_kept_while_a_child_still_runs():
    kept = []
    supervise(
        {},
        TODO,
        seconds=60,
        run=Children(deadly=[TODO[1]]),
        keep=lambda outcomes, processes: kept.append((outcomes, processes)),
    )
    first, last = kept[0], kept[-1]
    assert [(o["kernel"], o["case"], o["process"]) for o in first[0]] == [("a", "1", 0)]
    assert [p["error"] for p in first[1]] == ["it was still running"]
    assert [(o["case"], o["status"], o["process"]) for o in last[0]] == [
        ("1", _cells.MEASURED, 0),
        ("1", _cells.CRASHED, 0),
        ("2", _cells.MEASURED, 1),
    ]
    assert [p["error"] for p in last[1]] == ["killed by SIGSEGV", "it was still running"]
