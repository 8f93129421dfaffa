# SPDX-License-Identifier: Apache-2.0
"""Measure cells in child processes; if a process dies or hangs in a cell, another continues after it."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_hwplugin.base.errors import HwpluginError

from ...probe import one_line
from .._job import Event
from .._launch import Ended, run_child

#: A kernel's name and a case's key.
Cell = tuple[str, str]

MEASURED = "measured"
#: The kernel is not on this host.
MISSING = "missing"
#: The kernel does not support the case.
REFUSED = "refused"
#: The kernel raised an exception.
FAILED = "failed"
#: The process died, or was killed at its time limit.
CRASHED = "crashed"
NOT_RUN = "not run"

MODULE = "vllm_hwplugin_lab.bench.micro._child"
#: The rivals are unpatched vLLM's, so the plugin's platform class and operations are off.
ENVIRONMENT = {"VLLM_HWPLUGIN": "0"}
#: Extra seconds for a child beyond the run's limit: its start, and its last cell.
_START = 180.0
#: A kernel is skipped after it has ended this many processes.
_MOST_CRASHES = 2


class Missing(HwpluginError):
    """The kernel is not on this host."""


class Refused(HwpluginError):
    """The kernel does not support a case."""


def needed(module: str) -> Any:
    """Import a rival's module; raise Missing if that fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # an incompatible extension raises any error
        raise Missing(f"{module} is not importable: {one_line(error)}") from error


def outcome(cell: Cell, status: str, reason: str | None = None, **facts: Any) -> dict[str, Any]:
    kernel, case = cell
    return {"kernel": kernel, "case": case, "status": status, "reason": reason, **facts}


def supervise(
    job: dict[str, Any],
    todo: Sequence[Cell],
    *,
    seconds: float,
    limit: float,
    on_event: Callable[[Event], None] = lambda event: None,
    keep: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None] = lambda outcomes, processes: None,
    run: Callable[..., Ended] = run_child,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all cells; return outcomes and processes.

    An outcome has the index of its process.

    Args:
        job: The job of every child, without its cells and its time.
        seconds: Limit of the run: later cells are not run.
        limit: Seconds per cell, with compilation.
    """
    end, left, crashes = clock() + seconds, list(todo), Counter[str]()
    outcomes: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    begun: list[Cell] = []  # the process's current cell

    def over(cells: Sequence[Cell], status: str, reason: str | None, process: int | None = None) -> None:
        outcomes.extend({**outcome(cell, status, reason), "process": process} for cell in cells)
        left[:] = [cell for cell in left if cell not in cells]

    def hear(event: Event) -> None:
        on_event(event)
        facts = {key: value for key, value in event.items() if key != "event"}
        if event["event"] == "ready":
            processes[-1] |= facts
        elif event["event"] == "begin":
            begun[:] = [(event["kernel"], event["case"])]
        elif event["event"] == "cell":
            outcomes.append({**facts["outcome"], "process": len(processes) - 1})
            left.remove((facts["outcome"]["kernel"], facts["outcome"]["case"]))
            begun.clear()
            keep(outcomes, processes)

    while left:
        rest = end - clock()
        if processes and rest <= 0:
            over(left, NOT_RUN, "the time for the whole run was used up")
            break
        text = json.dumps({**job, "todo": left, "seconds": rest})
        processes.append({"error": "it was still running", "log_tail": ""})
        ended = run(MODULE, text, ENVIRONMENT, timeout=max(rest, 0) + _START, patience=limit, on_event=hear)
        processes[-1] |= {"error": ended.error, "log_tail": ended.log_tail}
        if begun:
            last_words = [ended.error or "the process ended in it", *ended.log_tail.strip().splitlines()[-1:]]
            over(begun, CRASHED, ": ".join(last_words), len(processes) - 1)
            kernel = begun.pop()[0]
            crashes[kernel] += 1
            if crashes[kernel] == _MOST_CRASHES:
                again = f"not tried again: {kernel} ended {_MOST_CRASHES} processes"
                over([cell for cell in left if cell[0] == kernel], NOT_RUN, again)
        elif ended.error is not None or clock() < end:
            # No cell was running: another process would end in the same way.
            over(left, NOT_RUN, f"the process ended before it: {ended.error or 'it reported that it was done'}")
    return outcomes, processes
