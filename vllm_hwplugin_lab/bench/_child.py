# SPDX-License-Identifier: Apache-2.0
"""The child's side of ``_launch``: its events, its commands, its engine, and the speed of its host.

It writes a JSON line per event, unbuffered. It reads a JSON line per command from its standard input, so that several
processes can take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._inside import ready_facts
from ._job import Job, Workload

_ITEMS = 2_000
_TRIES = 5


class Answer:
    """A child process's events for its parent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def say(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


def read_job(arguments: Sequence[str]) -> tuple[Job, Answer]:
    """Read the job's file, and open the answer's file.

    ``arguments`` are the names of both.
    """
    raw = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    raw["workloads"] = tuple(Workload(**fields) for fields in raw["workloads"])
    return Job(**raw), Answer(Path(arguments[1]))


def commands() -> Iterator[dict[str, Any]]:
    """Yield this process's commands, until ``end`` or the end of input."""
    while (line := sys.stdin.readline()) and (command := json.loads(line))["do"] != "end":
        yield command


@contextmanager
def engine(options: Mapping[str, Any], answer: Answer) -> Iterator[Any]:
    """Start an ``LLM``; report ``ready``, and ``done`` unless the block raises."""
    started = time.perf_counter()

    from vllm import LLM

    llm = LLM(**options)
    seconds = time.perf_counter() - started
    answer.say("ready", seconds=seconds, host_us=host_us(), pid=os.getpid(), **ready_facts(llm))
    yield llm
    # With multiprocessing an engine core would outlive this process.
    llm.llm_engine.engine_core.shutdown()
    answer.say("done")


class _Item:
    def __init__(self, number: int) -> None:
        self.number, self.name = number, str(number)

    def add(self, to: dict[str, int]) -> None:
        to[self.name] = to.get(self.name, 0) + self.number


def host_us() -> float:
    """Return the microseconds of a fixed piece of Python.

    It creates objects, gets attributes, calls functions and fills a dictionary; the best of some tries. A step of a
    small model costs what its Python costs, and on a shared machine that changes within minutes. So this is timed with
    each measurement.
    """
    return min(_once() for _ in range(_TRIES)) * 1e6


def _once() -> float:
    started = time.perf_counter()
    sums: dict[str, int] = {}
    for number in [_Item(number) for number in range(_ITEMS)]:
        number.add(sums)
    sorted(sums.items(), key=lambda pair: pair[1])
    return time.perf_counter() - started


def subtract(after: list[int], before: list[int]) -> list[int]:
    """Return the difference by position; ``before`` may be empty.

    It is empty if nothing had been drafted.
    """
    return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
