# SPDX-License-Identifier: Apache-2.0
"""Concurrent reading of several versions, with a counter on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from typing import TypeVar

from ._lines import note

Out = TypeVar("Out")

# Few enough for name servers and package indexes of small offices.
_CONNECTIONS = 4


def read_all(read: Callable[[str], Out], names: Sequence[str]) -> list[Out]:
    """Read several names concurrently, with a counter on a terminal.

    Returns `[read(name) for name in names]`.

    Raises:
        Exception: The first error of `read`; the remaining names are skipped.
    """
    results: list[Out] = []
    counts = len(names) > 1 and sys.stderr.isatty()
    # Python would wait for threads of concurrent.futures at exit, even after Ctrl-C with a server that does not answer.
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
    """Print notes on how the answers came about."""
    for text in notes:
        note(f"note: {text}")
