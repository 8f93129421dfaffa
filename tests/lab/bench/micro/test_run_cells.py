"""Cells in one process: no failure is swallowed, and none keeps the others from running."""

from __future__ import annotations

import time

from vllm_hwplugin_lab.bench.micro import _cells
from vllm_hwplugin_lab.bench.micro._run_cells import run_cells

TODO = [("good", "1"), ("bad", "1"), ("absent", "1"), ("narrow", "1"), ("good", "2")]


class Bench:
    def __init__(self, act=lambda cell: {"seconds": 1.0}):
        self.act = act

    def missing(self, cell):
        return "no such library" if cell[0] == "absent" else None

    def refuses(self, cell):
        return "too wide" if cell[0] == "narrow" else None

    def measure(self, cell):
        if cell[0] == "bad":
            raise ValueError("first line\nsecond line")
        return self.act(cell)


def run(bench, todo=TODO, **options):
    said = []
    options = {"seconds": 1e9, "check_device": lambda: None, **options}
    usable = run_cells(todo, bench, lambda event, **facts: said.append({"event": event, **facts}), **options)
    outcomes = [
        (o["outcome"]["kernel"], o["outcome"]["status"], o["outcome"]["reason"]) for o in said if "outcome" in o
    ]
    return usable, said, outcomes


def test_each_cell_says_what_became_of_it():
    usable, said, outcomes = run(Bench())
    assert usable
    assert outcomes == [
        ("good", _cells.MEASURED, None),
        ("bad", _cells.FAILED, "ValueError: first line"),
        ("absent", _cells.MISSING, "no such library"),
        ("narrow", _cells.REFUSED, "too wide"),
        ("good", _cells.MEASURED, None),
    ]
    assert said[:2] == [
        {"event": "begin", "kernel": "good", "case": "1"},
        {"event": "cell", "outcome": _cells.outcome(("good", "1"), _cells.MEASURED, None, seconds=1.0)},
    ]


def test_a_device_that_is_not_usable_ends_the_process_and_leaves_the_cell_begun():
    def check():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    usable, said, outcomes = run(Bench(), check_device=check)
    assert not usable
    assert said[-2:] == [
        {"event": "begin", "kernel": "bad", "case": "1"},
        {"event": "broken", "reason": "ValueError: first line"},
    ]
    assert len(outcomes) == 1


def test_cells_after_the_time_are_left():
    ticks = iter([0.0, 1.0, 11.0, 12.0])
    _, said, outcomes = run(Bench(), [("good", str(i)) for i in range(3)], seconds=10, clock=lambda: next(ticks))
    assert [status for _, status, _ in outcomes] == [_cells.MEASURED]
    assert said[-1]["event"] == "cell"


def test_a_cell_that_takes_too_long_is_interrupted_and_its_kernel_given_up_after_two():
    def slow(cell):
        try:
            time.sleep(30)
        except Exception:  # as a rival that falls back when its compiler fails
            time.sleep(30)
        return {}

    start = time.monotonic()
    usable, _, outcomes = run(Bench(slow), [("good", str(i)) for i in range(4)], limit=0.05)
    assert usable
    assert time.monotonic() - start < 10
    assert [status for _, status, _ in outcomes] == [_cells.FAILED] * 2 + [_cells.NOT_RUN] * 2
    assert outcomes[0][2] == "OverLimit: no result after 0.05 s"
    assert outcomes[2][2] == "not tried again: good was over the limit 2 times"
