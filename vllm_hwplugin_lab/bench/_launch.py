# SPDX-License-Identifier: Apache-2.0
"""Run a job in a fresh process, as this process sees it; what the child does is in ``_child``.

A crash becomes an outcome, never an exception that loses the other side.
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

from vllm_hwplugin import journals
from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.journal import pids

from . import _entry_points
from ._job import Event, Job

_TAIL_LINES = 30
#: Of exceptions before these.
_CAUSES = 3
#: In a log, where it says what was raised.
EXCEPTION = re.compile(r"\b\w+(Error|Exception): ")
#: In a log, where vLLM says how many seconds or GiB a part of a start took, and what graphs will take.
_TOOK = re.compile(r"\b(?:took|takes|Estimated CUDA graph memory)\b")
_POLL_SECONDS = 0.02
#: Seconds that an engine may take to end.
_END = 60.0
_Self = TypeVar("_Self", bound="Child")


def child_environment(extra: Mapping[str, str], metadata: Path | None = None) -> dict[str, str]:
    """This process's environment, with the package importable from wherever this copy of it lies.

    Args:
        extra: variables on top.
        metadata: a folder with this package's metadata and nothing else, see ``_entry_points``.
    """
    environment = {**os.environ, **extra}
    home = str(Path(__file__).resolve().parents[2])
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    if home not in paths:
        # Behind the user's own entries: only this package shall come from here.
        paths.append(home)
    if metadata is not None:
        # The first distribution of a name on the path is the one that counts.
        paths.insert(0, str(metadata))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


@dataclass(frozen=True)
class Ended:
    """A child process that is over.

    ``error`` is None when it said that it was done. ``took`` are the lines of its log that say what took how long.
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
    """Run ``python -m module JOB ANSWER`` in a fresh process and wait for it.

    Args:
        module: writes one JSON line an event into the file ANSWER, ``done`` as the last.
        job: the text of the file JOB.
        environment: on top of this process's own.
        timeout: seconds after which the process and its children are killed.
        patience: seconds after an event in which the next has to come; the start and the end take what they take.
        on_event: called for each line of the answer as it comes.

    Raises:
        NoEntryPoints: vLLM could not find the plugin in the child.
    """
    with ended_by_sigterm(), Child(module, job, environment) as child:
        deadline, heard = time.monotonic() + timeout, -1
        while heard < len(child.events):
            heard, left = len(child.events), deadline - time.monotonic()
            awaited = heard and child.events[-1]["event"] != "done"
            if not child.follow(min(left, patience) if awaited else left, until=lambda event: True, on_event=on_event):
                why = f"no word for {patience:g} s" if time.monotonic() < deadline else f"no end after {timeout:.0f} s"
                return child.end(f"{why}; killed")
        return child.end()


class Child:
    """A process that runs ``python -m module JOB ANSWER`` in a session of its own, with whatever it starts.

    Args:
        module: writes one JSON line an event into the file ANSWER, ``done`` as the last.
        job: the text of the file JOB.
        environment: on top of this process's own.
        under: a command that runs Python, such as compute-sanitizer with its options.

    Raises:
        NoEntryPoints: vLLM could not find the plugin in the child.
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
        # A record's time is cut to milliseconds.
        self._started, self._since = time.monotonic(), datetime.now(timezone.utc) - timedelta(milliseconds=1)
        self._answer, self._unfinished = answer.open(encoding="utf-8"), ""
        with self._log.open("wb") as output:
            # A session of its own: whatever the engine starts can be ended with it, and nothing else.
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
        """Write a line of JSON to the process; one that is gone says so in what :meth:`end` returns."""
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
        """Collect ``events`` until one satisfies ``until``, or the process is over; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.is_over  # asked before the read, so that nothing is left behind it
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

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def end(self, error: str | None = None) -> Ended:
        """Kill what is left of the process; ``error`` outweighs what its exit says."""
        self._kill()
        seconds = time.monotonic() - self._started
        error = error or _error(self._process.returncode, self.events)
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(_telling(log)) if error else ""
        took = tuple(line for line in log if _TOOK.search(line))
        return Ended(tuple(self.events), seconds, error, tail, self.records(), took)

    def records(self) -> tuple[dict[str, Any], ...]:
        """What the plugin has put in the journals of the process and of those that it started, so far."""
        # Under a command such as compute-sanitizer the engine is not this child, nor always a child of it.
        said = {event["pid"] for event in self.events if "pid" in event}
        return records_of({self._process.pid, *said}, self._since)

    def _kill(self) -> None:
        if self._killed:
            return  # its number may be another process's by now
        self._killed = True
        with contextlib.suppress(ProcessLookupError):  # the usual case: it ended by itself and left nothing behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def _telling(log: Sequence[str]) -> Sequence[str]:
    """The end of a log, and before it what its last exceptions above are: those of an engine's processes come first,
    and its caller then says at length that they have failed.
    """
    above = max(len(log) - _TAIL_LINES, 0)
    causes = [line for line in log[:above] if EXCEPTION.search(line)]
    return [*causes[-_CAUSES:], *log[above:]]


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
        """Whether the process says ``event`` within ``timeout`` seconds; if not, it has failed.

        Raises:
            TimeIsUp: all together have taken as long as they may; this one has not failed.
        """
        if self.error is not None:
            return False
        left, before = self._limit.left(), len(self.events)
        in_time = self.follow(min(timeout, left), until=lambda one: one["event"] == event, on_event=self._on_event)
        if not in_time:
            if left < timeout and not self._limit.left():
                raise TimeIsUp(f"the time limit of {self._limit.seconds:g} s")
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


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Unwind on SIGTERM as on Ctrl-C: an engine that outlives a time limit keeps the memory of the GPU."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
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
    """The process journals of the processes ``kin`` and of those that they started, oldest first."""
    kin = set(kin)
    found = []
    for one in journals.read_all():
        # Process ids come round again, and records outlive their processes; another container has the same ids.
        if one.pids == pids() and datetime.fromisoformat(one.started) >= since and (one.pid in kin or one.ppid in kin):
            kin.add(one.pid)
            found.append(dataclasses.asdict(one))
    return tuple(found)
