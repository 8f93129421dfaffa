# SPDX-License-Identifier: Apache-2.0
"""Measure in child processes: where one dies of a cell, another goes on behind it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .._job import Event
from .._launch import Ended, run_child
from . import _cells
from ._cells import Cell

MODULE = "vllm_hwplugin_lab.bench.micro._child"
#: The rivals are stock vLLM's: the platform class and the operations that the plugin would put in their place are off.
ENVIRONMENT = {"VLLM_HWPLUGIN": "0"}
#: Seconds beyond the run's own that a child may take: its start, and the cell that is on its way at the end.
_START = 180.0
#: A kernel whose cells ended so many processes is not tried again.
_MOST_CRASHES = 2


def supervise(
    job: dict[str, Any],
    todo: Sequence[Cell],
    *,
    seconds: float,
    on_event: Callable[[Event], None] = lambda event: None,
    keep: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None] = lambda outcomes, processes: None,
    run: Callable[..., Ended] = run_child,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all cells; returns their outcomes and the processes, which the outcomes name by index.

    Args:
        job: what every child gets besides its cells and its time.
        todo: kernel and case of each cell, in order.
        seconds: for the whole run; cells that would begin later are not run.
        on_event: called with each event of a child.
        keep: called after each cell with what would be returned if the run ended there.
        run: starts a child, as ``run_child``.
        clock: seconds.
    """
    end, so_far = clock() + seconds, _SoFar(todo)

    def listen(event: Event) -> None:
        on_event(event)
        so_far.hear(event)
        if event["event"] == "cell":
            keep(so_far.outcomes, so_far.processes)

    while so_far.todo:
        rest = end - clock()
        if so_far.processes and rest <= 0:
            so_far.not_run(so_far.todo, "the time for the whole run was used up")
            break
        text = json.dumps({**job, "todo": so_far.todo, "seconds": rest})
        so_far.processes.append({"error": "it was still running", "log_tail": ""})
        ended = run(MODULE, text, ENVIRONMENT, timeout=max(rest, 0) + _START, on_event=listen)
        so_far.processes[-1] |= {"error": ended.error, "log_tail": ended.log_tail}
        if so_far.begun is not None:
            so_far.crashed(so_far.begun, ended.error)
        elif ended.error is not None or clock() < end:
            # Nothing was on its way: another process would end the same way.
            so_far.not_run(so_far.todo, f"the process ended before it: {ended.error or 'it said that it was done'}")
    return so_far.outcomes, so_far.processes


class _SoFar:
    """What is known of a run, and the cells that no process has said anything of."""

    def __init__(self, todo: Sequence[Cell]) -> None:
        self.outcomes: list[dict[str, Any]] = []
        self.processes: list[dict[str, Any]] = []
        self.todo = list(todo)
        #: The cell that a process is at, or died of.
        self.begun: Cell | None = None
        self._broken: str | None = None
        self._crashes: Counter[str] = Counter()

    def hear(self, event: Event) -> None:
        if event["event"] in ("ready", "copies"):
            self.processes[-1] |= {key: value for key, value in event.items() if key != "event"}
        elif event["event"] == "begin":
            self.begun = (event["kernel"], event["case"])
        elif event["event"] == "broken":
            self._broken = f"the device was not usable after it: {event['reason']}"
        elif event["event"] == "cell":
            self._over(event["outcome"], len(self.processes) - 1)

    def crashed(self, cell: Cell, error: str | None) -> None:
        reason = self._broken or error or "the process ended in it"
        self._over(_cells.outcome(cell, _cells.CRASHED, reason), len(self.processes) - 1)
        kernel = cell[0]
        self._crashes[kernel] += 1
        if self._crashes[kernel] == _MOST_CRASHES:
            again = f"not tried again: {kernel} ended {_MOST_CRASHES} processes"
            self.not_run([one for one in self.todo if one[0] == kernel], again)

    def not_run(self, cells: Sequence[Cell], reason: str) -> None:
        for cell in tuple(cells):
            self._over(_cells.outcome(cell, _cells.NOT_RUN, reason), None)

    def _over(self, outcome: dict[str, Any], process: int | None) -> None:
        self.outcomes.append({**outcome, "process": process})
        self.todo.remove((outcome["kernel"], outcome["case"]))
        self.begun = self._broken = None
