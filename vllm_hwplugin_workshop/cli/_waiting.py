# SPDX-License-Identifier: Apache-2.0
"""Several versions read at once, and what a terminal is told meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from typing import TypeVar

from ._lines import note

Out = TypeVar("Out")

# Few enough that name servers and package indexes of small offices do not mind.
_CONNECTIONS = 4


def read_all(read: Callable[[str], Out], names: Sequence[str]) -> list[Out]:
    """`[read(name) for name in names]`, a few at a time, with a counter on a terminal.

    Raises:
        Exception: what `read` raises; the rest is then left.
    """
    results: list[Out] = []
    counts = len(names) > 1 and sys.stderr.isatty()
    # The threads of concurrent.futures are waited for when Python ends, also after Ctrl-C in a silent server's hands.
    with ThreadPool(_CONNECTIONS) as pool:
        try:
            for result in pool.imap(read, names):
                results.append(result)
                if counts:
                    print(f"\rread vLLM {len(results)}/{len(names)}", end="", file=sys.stderr, flush=True)
        finally:
            if counts:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return results


def say_notes(notes: Iterable[str]) -> None:
    """What a user should know about how the answers came about."""
    for text in notes:
        note(f"note: {text}")
