# SPDX-License-Identifier: Apache-2.0
"""The child's half of ``_launch``: what it says and is told, its engine, and how fast its host is.

It says one JSON line an event, there as soon as it was said. It is told one JSON line a command on its standard input,
so that several such processes can take turns.
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
    """Of a child process, to whom started it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def say(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


def read_job(arguments: Sequence[str]) -> tuple[Job, Answer]:
    """The job in the file that the first argument names, and the answer that goes into that of the second."""
    raw = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    raw["workloads"] = tuple(Workload(**one) for one in raw["workloads"])
    return Job(**raw), Answer(Path(arguments[1]))


def commands() -> Iterator[dict[str, Any]]:
    """What this process is told to ``do``, until that is ``end`` or nobody is there any more."""
    while (line := sys.stdin.readline()) and (command := json.loads(line))["do"] != "end":
        yield command


@contextmanager
def engine(options: Mapping[str, Any], answer: Answer) -> Iterator[Any]:
    """An ``LLM`` with these options, which ``answer`` calls ready, and done where nothing was raised."""
    started = time.perf_counter()

    from vllm import LLM

    llm = LLM(**options)
    seconds = time.perf_counter() - started
    answer.say("ready", seconds=seconds, host_us=host_us(), pid=os.getpid(), **ready_facts(llm))
    yield llm
    # With multiprocessing on, an engine core that is not told outlives this process.
    llm.llm_engine.engine_core.shutdown()
    answer.say("done")


class _Item:
    def __init__(self, number: int) -> None:
        self.number, self.name = number, str(number)

    def add(self, to: dict[str, int]) -> None:
        to[self.name] = to.get(self.name, 0) + self.number


def host_us() -> float:
    """Microseconds that a fixed piece of Python takes: objects, attributes, calls, a dictionary; the best of some.

    A step of a small model costs what its Python costs, and on a shared machine that changes within minutes. So it is
    timed beside each measurement.
    """
    return min(_once() for _ in range(_TRIES)) * 1e6


def _once() -> float:
    started = time.perf_counter()
    found: dict[str, int] = {}
    for item in [_Item(number) for number in range(_ITEMS)]:
        item.add(found)
    sorted(found.items(), key=lambda pair: pair[1])
    return time.perf_counter() - started


def subtract(after: list[int], before: list[int]) -> list[int]:
    """What was counted between two times, by position; ``before`` may be empty, when nothing had been drafted."""
    return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
