# SPDX-License-Identifier: Apache-2.0
"""Several versions read at once, and what a terminal is told meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

Out = TypeVar("Out")

# Few enough that name servers and package indexes of small offices do not mind.
_CONNECTIONS = 4

#: Seconds without an answer after which that is said.
PATIENCE = 5.0


def read_all(read: Callable[[str], Out], names: Sequence[str]) -> list[Out]:
    """`[read(name) for name in names]`, no name twice: a few at a time, with a counter on a terminal.

    Raises:
        Exception: what `read` raises; the rest is then left.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    finished: SimpleQueue[tuple[str, Out | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except Empty:
                return
            try:
                finished.put((name, read(name), None))
            except BaseException as error:
                finished.put((name, None, error))

    for name in names:
        waiting.put(name)
    for _ in range(min(_CONNECTIONS, len(names))):
        # Those of concurrent.futures are waited for when Python ends, also after Ctrl-C in a silent server's hands.
        threading.Thread(target=run, daemon=True).start()
    results: dict[str, Out] = {}
    counts, said = len(names) > 1 and sys.stderr.isatty(), False
    try:
        while len(results) < len(names):
            if counts:
                print(f"\rreading vLLM {len(results)}/{len(names)}", end="", file=sys.stderr, flush=True)
            try:
                name, result, error = finished.get(timeout=PATIENCE)
            except Empty:
                if not said:
                    _say_who([name for name in names if name not in results])
                said = True
                continue
            if error is not None:
                raise error
            results[name] = result  # type: ignore[assignment]
    finally:
        if counts:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return [results[name] for name in names]


def say_notes(notes: Iterable[str]) -> None:
    """What a user should know about how the answers came about."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _say_who(names: Sequence[str]) -> None:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    say_notes([f"still waiting for {', '.join(names[:3])}{more}; Ctrl-C ends it"])
