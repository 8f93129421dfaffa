# SPDX-License-Identifier: Apache-2.0
"""A child process with an engine that follows commands, and how long several of them may take together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm_hwplugin.errors import HwpluginError

from ._job import Event
from ._launch import Child, Ended

#: Seconds that an engine may take to end.
_END = 60.0


class TimeIsUp(HwpluginError):
    """The whole has taken as long as it may; what was measured before stays."""


class TimeLimit:
    """When a run of several engines is to end, whatever is left to do.

    Args:
        seconds: from now on; None: no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, not below 0; infinite without a limit."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raise where it is over.

        Raises:
            TimeIsUp: it is.
        """
        if not self.left():
            raise TimeIsUp(f"the time limit of {self.seconds:g} s")


class ChildJob(Protocol):
    """What a child process is given."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    def to_json(self) -> str: ...


class Session(Child):
    """A child that follows commands, from its start to its end; what it is asked after it failed is not done.

    Args:
        module: of the process.
        job: what it is given.
        on_event: called with what it says.
        limit: of all waiting.
        under: a command that runs Python, such as compute-sanitizer with its options.
    """

    def __init__(
        self,
        module: str,
        job: ChildJob,
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        limit: TimeLimit | None = None,
        under: tuple[str, ...] = (),
    ) -> None:
        super().__init__(module, job.to_json(), job.environment, under=under, commands=True)
        self._on_event, self._limit = on_event, limit or TimeLimit()
        self.error: str | None = None
        self._ended: Ended | None = None

    def wait_for(self, event: str, timeout: float) -> bool:
        """Whether the process says ``event`` within ``timeout`` seconds; if not, it has failed.

        Raises:
            TimeIsUp: all together have taken as long as they may; this one has not failed.
        """
        if self.error is not None:
            return False
        left, before = self._limit.left(), len(self.events)
        in_time = self.follow(min(timeout, left), until=lambda one: one["event"] == event, on_event=self._on_event)
        if not in_time:
            if left < timeout:
                self._limit.check()
            self.error = f"no answer {event!r} after {timeout:.0f} s; killed"
            # At once: it would go on beside the sides that are still measured.
            self._ended = self.end(self.error)
        elif [one["event"] for one in self.events[before:][-1:]] != [event]:
            self.error = ""  # the process is over, and its exit says why
        return self.error is None

    def tell(self, command: Mapping[str, Any]) -> None:
        """Give a command whose answer is waited for later."""
        if self.error is None:
            super().tell(command)

    def ask(self, command: Mapping[str, Any], answer: str, timeout: float) -> bool:
        """Give a command and wait for its answer, as :meth:`wait_for`."""
        self.tell(command)
        return self.wait_for(answer, timeout)

    def wait_for_end(self, timeout: float = _END) -> None:
        """See the process go that was told to end, or that ends by itself.

        The limit does not count here: all is done, and an engine that is ended meanwhile would be taken for a failure.
        """
        self._limit = TimeLimit()
        if self.wait_for("done", timeout):
            self.follow(timeout, until=lambda one: False)

    def ended(self) -> Ended:
        """What came of it; the process is over then."""
        return self._ended or self.end(self.error)
