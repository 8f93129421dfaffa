# SPDX-License-Identifier: Apache-2.0
"""Run a job in a fresh process: the parent's side. ``_child`` is the child's.

A crash becomes an outcome, never an exception that loses the other sides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.run_records import pids

from . import _entry_points
from ._job import Event, Job

_TAIL_LINES = 30
#: Exceptions to show before the log's last lines.
_CAUSES = 3
#: An exception's line in a log.
EXCEPTION = re.compile(r"\b\w+(Error|Exception): ")
#: Lines of vLLM's log with the seconds or GiB of a part of a start, and the memory of graphs.
_TOOK = re.compile(r"\b(?:took|takes|Estimated CUDA graph memory)\b")
_POLL_SECONDS = 0.02
#: Seconds for an engine to end.
_END = 60.0
_Self = TypeVar("_Self", bound="Child")


def child_environment(extra: Mapping[str, str], metadata: Path | None = None) -> dict[str, str]:
    """Return this process's environment with this package (``metadata``: its ``_entry_points``)."""
    environment = {**os.environ, **extra}
    home = str(Path(__file__).resolve().parents[2])
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    if home not in paths:
        # After the user's entries: only this package must come from here.
        paths.append(home)
    if metadata is not None:
        # The first distribution of a name on the path counts.
        paths.insert(0, str(metadata))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


@dataclass(frozen=True)
class Ended:
    """An ended child process.

    Attributes:
        error: None: it reported ``done``.
        took: Lines of its log about times and memory.
    """

    events: tuple[Event, ...]
    seconds: float
    error: str | None
    log_tail: str
    records: tuple[dict[str, Any], ...]
    took: tuple[str, ...] = ()


def run_child(
    module: str,
    job: str,
    environment: Mapping[str, str],
    *,
    timeout: float,
    patience: float = math.inf,
    on_event: Callable[[Event], None] | None = None,
) -> Ended:
    """Run ``python -m module JOB ANSWER`` in a process; wait for it.

    Args:
        module: Writes a JSON line per event to the file ANSWER, ``done`` last.
        timeout: Seconds until the process and its children are killed.
        patience: Most seconds between two events; the start and the end are not limited by it.

    Raises:
        NoEntryPoints: vLLM cannot find the plugin in the child.
    """
    with ended_by_sigterm(), Child(module, job, environment) as child:
        deadline, heard = time.monotonic() + timeout, -1
        while heard < len(child.events):
            heard, left = len(child.events), deadline - time.monotonic()
            awaited = heard and child.events[-1]["event"] != "done"
            if not child.follow(min(left, patience) if awaited else left, until=lambda event: True, on_event=on_event):
                why = f"no event for {patience:g} s" if time.monotonic() < deadline else f"no end after {timeout:.0f} s"
                return child.end(f"{why}; killed")
        return child.end()


class Child:
    """A process that runs ``python -m module JOB ANSWER`` in a new session, with its children.

    Args:
        module: Writes a JSON line per event to the file ANSWER, ``done`` last.
        under: A command that runs Python, such as compute-sanitizer with its options.

    Raises:
        NoEntryPoints: vLLM cannot find the plugin in the child.
    """

    def __init__(self, module: str, job: str, environment: Mapping[str, str], *, under: Sequence[str] = ()) -> None:
        self.events: list[Event] = []
        self._killed = False
        self._home = tempfile.TemporaryDirectory(prefix="hwplugin-bench-")
        folder = Path(self._home.name)
        (folder / "job.json").write_text(job, encoding="utf-8")
        answer, self._log = folder / "answer.jsonl", folder / "log"
        answer.touch()
        try:
            variables = child_environment(environment, _entry_points.provide(folder / "metadata"))
        except BaseException:
            self._home.cleanup()
            raise
        # Run records have times in milliseconds, rounded down.
        self._started, self._since = time.monotonic(), datetime.now(timezone.utc) - timedelta(milliseconds=1)
        self._answer, self._unfinished = answer.open(encoding="utf-8"), ""
        with self._log.open("wb") as output:
            # In a new session, so that killing it ends the engine with its children and nothing else.
            self._process = subprocess.Popen(
                [*under, sys.executable, "-m", module, str(folder / "job.json"), str(answer)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._answer.close()
        self._home.cleanup()

    def tell(self, command: Mapping[str, Any]) -> None:
        """Write a line of JSON to the process.

        If the process is gone, :meth:`end` returns the error.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def follow(
        self,
        timeout: float,
        *,
        until: Callable[[Event], bool],
        on_event: Callable[[Event], None] | None = None,
    ) -> bool:
        """Collect ``events`` until one satisfies ``until``, or the process ends.

        False: ``timeout`` seconds passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self._process.poll() is not None  # before the read, which then gets all output
            *lines, self._unfinished = (self._unfinished + self._answer.read()).split("\n")
            for number, line in enumerate(lines):
                self.events.append(json.loads(line))
                if on_event is not None:
                    on_event(self.events[-1])
                if until(self.events[-1]):
                    self._unfinished = "\n".join([*lines[number + 1 :], self._unfinished])
                    return True
            if ended:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def end(self, error: str | None = None) -> Ended:
        """Kill the rest of the process; ``error`` overrides its exit status."""
        self._kill()
        seconds = time.monotonic() - self._started
        error = error or _error(self._process.returncode, self.events)
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(_telling(log)) if error else ""
        took = tuple(line for line in log if _TOOK.search(line))
        return Ended(tuple(self.events), seconds, error, tail, self.records(), took)

    def records(self) -> tuple[dict[str, Any], ...]:
        """Return the run records of the process and its children, so far."""
        # Under a command such as compute-sanitizer the engine is another process, not always a child of this one.
        reported = {event["pid"] for event in self.events if "pid" in event}
        return records_of({self._process.pid, *reported}, self._since)

    def _kill(self) -> None:
        if self._killed:
            return  # another process may have the id now
        self._killed = True
        with contextlib.suppress(ProcessLookupError):  # usually it has ended with all children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def _telling(log: Sequence[str]) -> Sequence[str]:
    """Return the end of a log, after its last exceptions."""
    # An engine's processes raise first, and then its caller reports at length that they have failed.
    above = max(len(log) - _TAIL_LINES, 0)
    causes = [line for line in log[:above] if EXCEPTION.search(line)]
    return [*causes[-_CAUSES:], *log[above:]]


class TimeIsUp(HwpluginError):
    """The run has reached its time limit; earlier measurements stay."""


class TimeLimit:
    """The time limit of a run of several engines, in seconds from now; None: no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left, at least 0; infinite without a limit."""
        return max(0.0, self._end - time.monotonic())

    def reached(self) -> TimeIsUp:
        """Return the error of a run that is at its limit."""
        return TimeIsUp(f"the time limit of {self.seconds:g} s")


class Session(Child):
    """A child that follows commands; after a failure it ignores them."""

    def __init__(
        self,
        module: str,
        job: Job,
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        limit: TimeLimit | None = None,
        under: Sequence[str] = (),
    ) -> None:
        super().__init__(module, json.dumps(dataclasses.asdict(job)), job.environment, under=under)
        self._on_event, self._limit = on_event, limit or TimeLimit()
        self.error: str | None = None
        self._ended: Ended | None = None

    def wait_for(self, event: str, timeout: float) -> bool:
        """Wait for ``event``; return whether it came in time.

        If not, the process has failed.

        Raises:
            TimeIsUp: The run has reached its time limit; this process has not failed.
        """
        if self.error is not None:
            return False
        left, before = self._limit.left(), len(self.events)
        in_time = self.follow(min(timeout, left), until=lambda heard: heard["event"] == event, on_event=self._on_event)
        if not in_time:
            if left < timeout and not self._limit.left():
                raise self._limit.reached()
            self.error = f"no answer {event!r} after {timeout:.0f} s; killed"
            # Immediately: it would disturb the sides that are still measured.
            self._ended = self.end(self.error)
        elif [heard["event"] for heard in self.events[before:][-1:]] != [event]:
            self.error = ""  # the process has ended, and `ended` returns why
        return self.error is None

    def tell(self, command: Mapping[str, Any]) -> None:
        """Give a command; :meth:`wait_for` waits for its answer."""
        if self.error is None:
            super().tell(command)

    def ask(self, command: Mapping[str, Any], answer: str, timeout: float) -> bool:
        """Give a command, and wait for its answer as :meth:`wait_for`."""
        self.tell(command)
        return self.wait_for(answer, timeout)

    def wait_for_end(self, timeout: float = _END) -> None:
        """Wait for the end of the process.

        The run's limit does not apply: the work is done, and killing the engine would look like a failure.
        """
        self._limit = TimeLimit()
        if self.wait_for("done", timeout):
            self.follow(timeout, until=lambda event: False)

    def ended(self) -> Ended:
        """Return the result; the process has ended then."""
        return self._ended or self.end(self.error)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Unwind on SIGTERM as on Ctrl-C.

    An engine that outlives a time limit keeps the GPU's memory.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only the main thread is interrupted
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _error(code: int, events: Sequence[Event]) -> str | None:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code > 0:
        return f"exit code {code}"
    if not any(e["event"] == "done" for e in events):
        return "exit code 0 before everything was measured"
    return None


def records_of(kin: set[int], since: datetime) -> tuple[dict[str, Any], ...]:
    """Return the run records that these processes and their children wrote.

    The oldest is first.
    """
    kin = set(kin)
    records = []
    for record in run_records.read_all():
        # Process ids are reused, and records outlive their processes; another container has the same ids.
        is_new = record.pids == pids() and datetime.fromisoformat(record.started) >= since
        if is_new and (record.pid in kin or record.ppid in kin):
            kin.add(record.pid)
            records.append(dataclasses.asdict(record))
    return tuple(records)
