# SPDX-License-Identifier: Apache-2.0
"""Run cells one after the other in one process, and say of each what became of it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from . import _cells
from ._cells import Cell

#: Seconds for one cell, compilation included.
LIMIT = 45.0
#: A kernel that was over the limit so often is not tried again: it compiles for every shape.
_MOST_LIMITS = 2


class Bench(Protocol):
    """What a table is made of."""

    def missing(self, cell: Cell) -> str | None:
        """Why the kernel is not on this host, or None."""

    def refuses(self, cell: Cell) -> str | None:
        """Why the kernel does not claim to run the case, or None."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        """What the results file says of the cell."""


class OverLimit(BaseException):
    """A cell took too long. No ``Exception``: what a rival does with those must not keep it running."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt Python code, a compiler that it waits for included, by `OverLimit`; a hanging kernel is not stopped."""

    def over(signum: int, frame: FrameType | None) -> None:
        raise OverLimit(f"no result after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_cells(
    todo: Sequence[Cell],
    bench: Bench,
    say: Callable[..., None],
    *,
    seconds: float,
    check_device: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    limit: float = LIMIT,
) -> bool:
    """Run ``todo`` in its order; returns whether the device is usable afterwards.

    Args:
        bench: measures a cell.
        say: passes on an event: ``begin``, ``cell`` or ``broken``.
        seconds: cells that would begin later than that are left, and nothing is said of them.
        check_device: raises where the device is not usable.
        clock: seconds.
        limit: for one cell.
    """
    start = clock()
    limits: dict[str, int] = {}

    def over(cell: Cell, status: str, reason: str | None = None, facts: Mapping[str, Any] | None = None) -> None:
        say("cell", outcome=_cells.outcome(cell, status, reason, **(facts or {})))

    for cell in todo:
        kernel, case = cell
        if clock() - start > seconds:
            break
        if limits.get(kernel, 0) >= _MOST_LIMITS:
            over(cell, _cells.NOT_RUN, f"not tried again: {kernel} was over the limit {_MOST_LIMITS} times")
            continue
        say("begin", kernel=kernel, case=case)
        try:
            with limited(limit):
                if (reason := bench.missing(cell)) is not None:
                    over(cell, _cells.MISSING, reason)
                    continue
                if (reason := bench.refuses(cell)) is not None:
                    over(cell, _cells.REFUSED, reason)
                    continue
                facts = bench.measure(cell)
        except (Exception, OverLimit) as error:  # of a rival's as of ours: the table says which
            if isinstance(error, OverLimit):
                limits[kernel] = limits.get(kernel, 0) + 1
            reason = one_line(error)
            try:
                check_device()
            except Exception:  # what it raises says only that an earlier launch failed
                say("broken", reason=reason)
                return False
            over(cell, _cells.FAILED, reason)
            continue
        over(cell, _cells.MEASURED, None, facts)
    return True


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
