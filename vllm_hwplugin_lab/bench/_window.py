# SPDX-License-Identifier: Apache-2.0
"""The part of a run in which every request of a batch is drafting: from the last first token to the first last one.

Before it prompts are still read, after it the batch is smaller than it is called. With coin-flipped acceptance both
ends differ from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Moment:
    """``at`` in seconds; ``steps`` and ``tokens`` of the engine so far."""

    at: float
    steps: int
    tokens: int


class Window:
    """Of one batch.

    Args:
        size: requests in it.
        now: what the engine has done by now.
    """

    def __init__(self, size: int, now: Callable[[], Moment]) -> None:
        self._missing, self._now = size, now
        self._start: Moment | None = None
        self._end: Moment | None = None

    def begun(self) -> None:
        """A request has its first token."""
        self._missing -= 1
        if not self._missing and self._end is None:
            self._start = self._now()

    def finished(self) -> None:
        """A request has its last token."""
        if self._end is None:
            self._end = self._now()

    def facts(self) -> dict[str, float]:
        """``seconds``, ``steps`` and ``tokens`` of the window; zeros where one request ended before another began."""
        if self._start is None or self._end is None:
            return {"seconds": 0.0, "steps": 0, "tokens": 0}
        return {
            "seconds": self._end.at - self._start.at,
            "steps": self._end.steps - self._start.steps,
            "tokens": self._end.tokens - self._start.tokens,
        }


def added(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several windows as those of one."""
    return {name: sum(one[name] for one in windows) for name in ("seconds", "steps", "tokens")}
