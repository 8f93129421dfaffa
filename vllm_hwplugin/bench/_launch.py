# SPDX-License-Identifier: Apache-2.0
"""Run a job in a fresh process; a crash becomes an outcome, never an exception that loses the other side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
from typing import Any

from .. import record
from . import _entry_points
from ._job import Event, Job, Outcome

_TAIL_LINES = 30


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
    """A child process that is over; ``error`` is None when it said that it was done."""

    events: tuple[Event, ...]
    seconds: float
    error: str | None
    log_tail: str
    records: tuple[dict[str, Any], ...]


def launch(job: Job, *, timeout: float, on_event: Callable[[Event], None] | None = None) -> Outcome:
    """Run ``job`` and wait for it.

    Args:
        job: what to run.
        timeout: seconds after which the process and its children are killed.
        on_event: called for each line of the answer as it comes.
    """
    module = "vllm_hwplugin.bench._engine"
    ended = run_child(module, job.to_json(), job.environment, timeout=timeout, on_event=on_event)
    return Outcome(job, ended.events, ended.seconds, ended.error, ended.log_tail, ended.records)


def run_child(
    module: str,
    job: str,
    environment: Mapping[str, str],
    *,
    timeout: float,
    on_event: Callable[[Event], None] | None = None,
    under: Sequence[str] = (),
) -> Ended:
    """Run ``python -m module JOB ANSWER`` in a fresh process and wait for it.

    Args:
        module: writes one JSON line an event into the file ANSWER, ``done`` as the last.
        job: the text of the file JOB.
        environment: on top of this process's own.
        timeout: seconds after which the process and its children are killed.
        on_event: called for each line of the answer as it comes.
        under: a command that runs Python, such as compute-sanitizer with its options.

    Raises:
        NoEntryPoints: vLLM could not find the plugin in the child.
    """
    with tempfile.TemporaryDirectory(prefix="hwplugin-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job, encoding="utf-8")
        answer, log = folder / "answer.jsonl", folder / "log"
        answer.touch()
        command = [*under, sys.executable, "-m", module, str(folder / "job.json"), str(answer)]
        variables = child_environment(environment, _entry_points.provide(folder / "metadata"))
        # A record's time is cut to milliseconds.
        started, since = time.monotonic(), datetime.now(timezone.utc) - timedelta(milliseconds=1)
        with log.open("wb") as output, _ended_by_sigterm():
            # A session of its own: whatever the engine starts can be ended with it, and nothing else.
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                events, timed_out = _follow(process, answer, started + timeout, on_event)
            finally:
                _end(process)
        seconds = time.monotonic() - started
        error = _error(process.returncode, timeout if timed_out else None, events)
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]) if error else ""
        return Ended(tuple(events), seconds, error, tail, _records(process.pid, since))


def _follow(
    process: subprocess.Popen[bytes], answer: Path, deadline: float, on_event: Callable[[Event], None] | None
) -> tuple[list[Event], bool]:
    events: list[Event] = []
    unfinished = ""
    with answer.open(encoding="utf-8") as stream:
        while True:
            ended = process.poll() is not None  # asked before the read, so that nothing is left behind it
            *lines, unfinished = (unfinished + stream.read()).split("\n")
            for line in lines:
                events.append(json.loads(line))
                if on_event is not None:
                    on_event(events[-1])
            if ended:
                return events, False
            if time.monotonic() > deadline:
                return events, True
            time.sleep(0.1)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Unwind on SIGTERM as on Ctrl-C: an engine that outlives a time limit keeps the memory of the GPU."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the usual case: it ended by itself and left nothing behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(code: int, timeout: float | None, events: list[Event]) -> str | None:
    if timeout is not None:
        return f"no end after {timeout:.0f} s; killed"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code > 0:
        return f"exit code {code}"
    if not any(e["event"] == "done" for e in events):
        return "exit code 0 before everything was measured"
    return None


def _records(pid: int, since: datetime) -> tuple[dict[str, Any], ...]:
    """The process records of the engine's process and of those that it started, oldest first."""
    kin = {pid}
    found = []
    for one in record.read_all():
        # Process ids come round again, and records outlive their processes.
        if datetime.fromisoformat(one.started) >= since and (one.pid in kin or one.ppid in kin):
            kin.add(one.pid)
            found.append(dataclasses.asdict(one))
    return tuple(found)
