# SPDX-License-Identifier: Apache-2.0
"""A cell of a table: one kernel on one case. Which are still to do, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: (kernel, key of the case)
Cell = tuple[str, str]

MEASURED = "measured"
#: The kernel is not on this host.
MISSING = "missing"
#: It does not claim to run the case.
REFUSED = "refused"
#: It raised an exception.
FAILED = "failed"
#: Its process died or hung.
CRASHED = "crashed"
NOT_RUN = "not run"

#: A kernel whose cells ended so many processes is not tried again.
_MOST_CRASHES = 2


@dataclass(frozen=True)
class Progress:
    """What is known after one child process.

    Attributes:
        outcomes: of the cells that are over, in the form of the results file.
        todo: the cells for the next process; empty when it is over.
    """

    outcomes: tuple[dict[str, Any], ...]
    todo: tuple[Cell, ...]


def outcome(cell: Cell, status: str, reason: str | None = None, **facts: Any) -> dict[str, Any]:
    kernel, case = cell
    return {"kernel": kernel, "case": case, "status": status, "reason": reason, **facts}


def after(
    todo: Sequence[Cell], events: Iterable[dict[str, Any]], error: str | None, crashes: Sequence[str] = ()
) -> Progress:
    """Read a child's answer: what it measured, the cell that it died of, and what is left for another one.

    Args:
        todo: the cells that the child was given.
        events: what it said: ``begin`` before and ``cell`` after each cell, or ``broken`` where the device was not
            usable after it.
        error: why it ended, None where it said that it was done.
        crashes: the kernel of each cell that an earlier child died of.
    """
    outcomes = []
    begun: Cell | None = None
    reason = error or "the process ended in it"
    for event in events:
        if event["event"] == "begin":
            begun = (event["kernel"], event["case"])
        elif event["event"] == "cell":
            begun = None
            outcomes.append(event["outcome"])
        elif event["event"] == "broken":
            reason = f"the device was not usable after it: {event['reason']}"
    over = {(found["kernel"], found["case"]) for found in outcomes}
    left = [cell for cell in todo if cell not in over]
    if begun is None:
        # Nothing was on its way: another process would end the same way.
        ended = f"the process ended before it: {error or 'it said that it was done'}"
        return Progress((*outcomes, *(outcome(cell, NOT_RUN, ended) for cell in left)), ())
    outcomes.append(outcome(begun, CRASHED, reason))
    left.remove(begun)
    kernel = begun[0]
    if [*crashes, kernel].count(kernel) >= _MOST_CRASHES:
        again = f"not tried again: {kernel} ended {_MOST_CRASHES} processes"
        outcomes += [outcome(cell, NOT_RUN, again) for cell in left if cell[0] == kernel]
        left = [cell for cell in left if cell[0] != kernel]
    return Progress(tuple(outcomes), tuple(left))
