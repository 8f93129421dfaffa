"""Cells in children, one after the other, until every cell has an outcome; no failure keeps others from running."""

from __future__ import annotations

import json

import pytest

from vllm_hwplugin_lab.bench._launch import Ended
from vllm_hwplugin_lab.bench.micro import _supervise as cells
from vllm_hwplugin_lab.bench.micro._child import run_cells
from vllm_hwplugin_lab.bench.micro._supervise import ENVIRONMENT, Missing, Refused, outcome, supervise

TODO = [("a", "1"), ("b", "1"), ("a", "2")]
READY = {"event": "ready", "copy_bandwidth": 4e12}


RAISED = {"bad": ValueError("first\n  second"), "narrow": Refused("too wide"), "absent": Missing("no library")}


def told(kernels, **options):
    """What is said of kernel:case, and which were asked; the kernels do as they are called."""
    said, asked = [], []

    def measure(kernel, case):
        asked.append((kernel, case))
        if kernel in RAISED:
            raise RAISED[kernel]
        return {"seconds": 1.0}

    def say(event, **facts):
        said.append((event, facts))

    options = {"end": 1e9, "check_device": lambda: None, "clock": lambda: 0.0, **options}
    run_cells([tuple(one.split(":")) for one in kernels], measure, say, **options)
    return said, asked


def test_each_cell_says_what_became_of_it_and_a_missing_kernel_is_looked_for_once_for_each_operation():
    todo = ["good:1", "bad:1", "narrow:1", "absent:op t1", "absent:op t8", "absent:other t1"]
    said, asked = told(todo)
    assert said[0] == ("begin", {"kernel": "good", "case": "1"})
    assert said[1] == ("cell", {"outcome": outcome(("good", "1"), cells.MEASURED, None, seconds=1.0)})
    assert [(facts["outcome"]["status"], facts["outcome"]["reason"]) for _, facts in said[1::2]] == [
        (cells.MEASURED, None),
        (cells.FAILED, "ValueError: first second"),
        (cells.REFUSED, "too wide"),
        *[(cells.MISSING, "no library")] * 3,
    ]
    assert [case for kernel, case in asked if kernel == "absent"] == ["op t1", "other t1"]


def test_a_device_that_is_not_usable_ends_the_process_in_the_cell():
    def check():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(SystemExit, match="the device was not usable after it: ValueError: first second"):
        told(["bad:1", "good:1"], check_device=check)


class Children:
    """Each measures all its cells but dies of those of `deadly`, and forgets `forgotten`."""

    def __init__(self, deadly=(), starts=True, forgotten=()):
        self.deadly, self.starts, self.forgotten, self.jobs = deadly, starts, forgotten, []

    def __call__(self, module, text, environment, *, timeout, patience, on_event):
        assert (module, environment, patience) == (cells.MODULE, ENVIRONMENT, 45)
        self.jobs.append((json.loads(text), timeout))
        error = None if self.starts and not self._dies(on_event) else "killed by SIGSEGV"
        return Ended((), 5.0, error, "its log\nits end\n" if error else "", ())

    def _dies(self, on_event):
        on_event(READY)
        for kernel, case in self.jobs[-1][0]["todo"]:
            if (kernel, case) in self.forgotten:
                continue
            on_event({"event": "begin", "kernel": kernel, "case": case})
            if (kernel, case) in self.deadly:
                return True
            on_event({"event": "cell", "outcome": outcome((kernel, case), cells.MEASURED)})
        return False


def supervised(children, todo=TODO, **options):
    return supervise({"kind": "ops"}, todo, seconds=60, limit=45, run=children, **options)


def test_one_child_measures_all_with_the_time_that_is_there_beside_stock_rivals():
    children, seen = Children(), []
    outcomes, processes = supervised(children, on_event=seen.append)
    assert outcomes == [{**outcome(cell, cells.MEASURED), "process": 0} for cell in TODO]
    ((job, timeout),) = children.jobs
    assert (job["kind"], job["todo"]) == ("ops", [list(cell) for cell in TODO])
    assert job["seconds"] == pytest.approx(60, abs=1)
    assert timeout > 60
    assert processes == [{"error": None, "log_tail": "", "copy_bandwidth": 4e12}]
    assert seen[0] == READY
    assert ENVIRONMENT["VLLM_HWPLUGIN"] == "0"


def test_another_child_goes_on_behind_the_cell_that_killed_the_first_and_what_was_measured_is_kept_meanwhile():
    kept = []
    found = supervised(Children(deadly=[TODO[1]]), keep=lambda *so_far: kept.append(json.dumps(so_far)))

    def said(outcomes, processes):
        return [(o["case"], o["status"], o["process"]) for o in outcomes], [p["error"] for p in processes]

    measured = [("1", cells.MEASURED, 0), ("1", cells.CRASHED, 0), ("2", cells.MEASURED, 1)]
    assert said(*found) == (measured, ["killed by SIGSEGV", None])
    assert found[0][1]["reason"] == "killed by SIGSEGV: its end"
    assert said(*json.loads(kept[0])) == (measured[:1], ["it was still running"])
    assert said(*json.loads(kept[-1])) == (measured, ["killed by SIGSEGV", "it was still running"])


def test_a_kernel_that_kills_twice_is_given_up_and_another_is_not():
    todo = [*(("a", str(i)) for i in range(5)), ("b", "1")]
    children = Children(deadly=todo[:5])
    outcomes, _ = supervised(children, todo)
    assert len(children.jobs) == 3
    found = {(o["kernel"], o["case"]): o["status"] for o in outcomes}
    assert [found[cell] for cell in todo] == [*[cells.CRASHED] * 2, *[cells.NOT_RUN] * 3, cells.MEASURED]


@pytest.mark.parametrize(
    ("children", "reason"),
    [
        (Children(starts=False), "the process ended before it: killed by SIGSEGV"),
        (Children(forgotten=TODO), "the process ended before it: it reported that it was done"),
    ],
)
def test_a_child_that_ends_before_a_cell_is_not_followed_by_another(children, reason):
    outcomes, _ = supervised(children)
    assert len(children.jobs) == 1
    assert {(o["status"], o["reason"]) for o in outcomes} == {(cells.NOT_RUN, reason)}


@pytest.mark.parametrize("children", [Children(deadly=[TODO[0]]), Children(forgotten=TODO[1:])])
def test_when_the_time_is_used_up_no_child_is_started_and_the_cells_that_are_left_say_so(children):
    ticks = iter([0.0, 0.0])
    outcomes, _ = supervised(children, clock=lambda: next(ticks, 61.0))
    assert len(children.jobs) == 1
    reason = (cells.NOT_RUN, "the time for the whole run was used up", None)
    assert [(o["status"], o["reason"], o["process"]) for o in outcomes[1:]] == [reason] * 2
