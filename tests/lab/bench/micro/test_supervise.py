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
    """Each measures all its cells but dies of those of `deadly`, of which it says `last`, and forgets `forgotten`."""

    def __init__(self, deadly=(), starts=True, last=(), forgotten=()):
        self.deadly, self.starts, self.last, self.forgotten, self.jobs = deadly, starts, last, forgotten, []

    def __call__(self, module, text, environment, *, timeout, on_event):
        assert (module, environment) == (MODULE, ENVIRONMENT)
        self.jobs.append((json.loads(text), timeout))
        error = None if self.starts and not self._dies(on_event) else "killed by SIGSEGV"
        return Ended((), 5.0, error, "its log" if error else "", ())

    def _dies(self, on_event):
        on_event(READY)
        for kernel, case in self.jobs[-1][0]["todo"]:
            if (kernel, case) in self.forgotten:
                continue
            on_event({"event": "begin", "kernel": kernel, "case": case})
            if (kernel, case) in self.deadly:
                for event in self.last:
                    on_event(event)
                return True
            on_event({"event": "cell", "outcome": _cells.outcome((kernel, case), _cells.MEASURED)})
        on_event({"event": "copies", "copies": [{"bytes": 2, "seconds": 1.0}]})
        return False


def test_one_child_measures_all_with_the_time_that_is_there():
    children, seen = Children(), []
    outcomes, processes = supervise({"kind": "ops"}, TODO, seconds=60, run=children, on_event=seen.append)
    assert outcomes == [{**_cells.outcome(cell, _cells.MEASURED), "process": 0} for cell in TODO]
    ((job, timeout),) = children.jobs
    assert (job["kind"], job["todo"]) == ("ops", [list(cell) for cell in TODO])
    assert job["seconds"] == pytest.approx(60, abs=1)
    assert timeout > 60
    facts = {"copy_bandwidth": 4e12, "pid": 3, "copies": [{"bytes": 2, "seconds": 1.0}]}
    assert processes == [{"error": None, "log_tail": "", **facts}]
    assert seen[0] == READY


def test_another_child_goes_on_behind_the_cell_that_killed_the_first_and_what_was_measured_is_kept_meanwhile():
    kept = []
    children = Children(deadly=[TODO[1]])
    found = supervise(
        {},
        TODO,
        seconds=60,
        run=children,
        keep=lambda outcomes, processes: kept.append(json.dumps([outcomes, processes])),
    )

    def said(outcomes, processes):
        return [(o["case"], o["status"], o["process"]) for o in outcomes], [p["error"] for p in processes]

    cells = [("1", _cells.MEASURED, 0), ("1", _cells.CRASHED, 0), ("2", _cells.MEASURED, 1)]
    assert said(*found) == (cells, ["killed by SIGSEGV", None])
    assert found[1][0]["log_tail"] == "its log"
    assert said(*json.loads(kept[0])) == (cells[:1], ["it was still running"])
    assert said(*json.loads(kept[-1])) == (cells, ["killed by SIGSEGV", "it was still running"])


def test_a_device_that_is_not_usable_says_what_broke_it():
    children = Children(deadly=TODO[:2], last=[{"event": "broken", "reason": "illegal memory access"}])
    outcomes, _ = supervise({}, TODO, seconds=60, run=children)
    reason = "the device was not usable after it: illegal memory access"
    assert [(o["status"], o["reason"]) for o in outcomes[:2]] == [(_cells.CRASHED, reason)] * 2
    assert outcomes[2]["status"] == _cells.MEASURED


def test_a_kernel_that_kills_twice_is_given_up_and_another_is_not():
    todo = [*(("a", str(i)) for i in range(5)), ("b", "1")]
    children = Children(deadly=todo[:5])
    outcomes, _ = supervise({}, todo, seconds=60, run=children)
    assert len(children.jobs) == 3
    found = {(o["kernel"], o["case"]): (o["status"], o["reason"]) for o in outcomes}
    crashed, given_up = (_cells.CRASHED, "killed by SIGSEGV"), (_cells.NOT_RUN, "not tried again: a ended 2 processes")
    assert [found[cell] for cell in todo] == [crashed, crashed, *[given_up] * 3, (_cells.MEASURED, None)]


@pytest.mark.parametrize(
    ("children", "error", "reason"),
    [
        (Children(starts=False), "killed by SIGSEGV", "killed by SIGSEGV"),
        (Children(forgotten=TODO), None, "it said that it was done"),
    ],
)
def test_a_child_that_ends_before_a_cell_is_not_followed_by_another(children, error, reason):
    outcomes, processes = supervise({}, TODO, seconds=60, run=children)
    assert len(children.jobs) == 1
    assert {(o["status"], o["reason"]) for o in outcomes} == {
        (_cells.NOT_RUN, f"the process ended before it: {reason}")
    }
    assert [one["error"] for one in processes] == [error]


@pytest.mark.parametrize("children", [Children(deadly=[TODO[0]]), Children(forgotten=TODO[1:])])
def test_when_the_time_is_used_up_no_child_is_started_and_the_cells_that_are_left_say_so(children):
    ticks = iter([0.0, 0.0])
    outcomes, _ = supervise({}, TODO, seconds=60, run=children, clock=lambda: next(ticks, 61.0))
    assert len(children.jobs) == 1
    reason = (_cells.NOT_RUN, "the time for the whole run was used up", None)
    assert [(o["status"], o["reason"], o["process"]) for o in outcomes[1:]] == [reason] * 2


def test_the_rivals_are_stock():
    assert ENVIRONMENT["VLLM_HWPLUGIN"] == "0"
