# SPDX-License-Identifier: Apache-2.0
"""Measure in child processes: where one dies of a cell, another goes on behind it."""

from __future__ import annotations

import json
import time
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
    outcomes: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    crashes: list[str] = []
    start, left = clock(), tuple(todo)
    while left:
        rest = seconds - (clock() - start)
        if processes and rest <= 0:
            reason = "the time for the whole run was used up"
            outcomes += [{**_cells.outcome(cell, _cells.NOT_RUN, reason), "process": None} for cell in left]
            break
        text = json.dumps({**job, "todo": left, "seconds": rest})
        listen = _listener(on_event, keep, tuple(outcomes), tuple(processes))
        ended = run(MODULE, text, ENVIRONMENT, timeout=max(rest, 0) + _START, on_event=listen)
        progress = _cells.after(left, ended.events, ended.error, crashes)
        outcomes += _in_process(progress.outcomes, len(processes))
        crashes += [found["kernel"] for found in progress.outcomes if found["status"] == _cells.CRASHED]
        processes.append(_process(ended.events, error=ended.error, log_tail=ended.log_tail))
        left = progress.todo
    return outcomes, processes


def _listener(
    on_event: Callable[[Event], None],
    keep: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None],
    outcomes: Sequence[dict[str, Any]],
    processes: Sequence[dict[str, Any]],
) -> Callable[[Event], None]:
    """Follows one child; ``outcomes`` and ``processes`` are those of the earlier ones."""
    said: list[Event] = []

    def listen(event: Event) -> None:
        said.append(event)
        on_event(event)
        if event["event"] == "cell":
            so_far = [one["outcome"] for one in said if one["event"] == "cell"]
            facts = _process(said, error="it was still running", log_tail="")
            keep([*outcomes, *_in_process(so_far, len(processes))], [*processes, facts])

    return listen


def _in_process(outcomes: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [{**one, "process": index} for one in outcomes]


def _process(events: Sequence[Event], *, error: str | None, log_tail: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"error": error, "log_tail": log_tail}
    for event in events:
        if event["event"] in ("ready", "copies"):
            facts |= {key: value for key, value in event.items() if key != "event"}
    return facts
