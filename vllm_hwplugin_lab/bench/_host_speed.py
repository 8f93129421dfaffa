# SPDX-License-Identifier: Apache-2.0
"""How fast the host runs Python at this moment: the same piece of it, timed beside each measurement.

A step of a small model costs what its Python costs, and on a shared machine that changes within minutes.
"""

from __future__ import annotations

import time

_ITEMS = 2_000
_TRIES = 5


class _Item:
    def __init__(self, number: int) -> None:
        self.number, self.name = number, str(number)

    def add(self, to: dict[str, int]) -> None:
        to[self.name] = to.get(self.name, 0) + self.number


def host_us() -> float:
    """Microseconds that a fixed piece of Python takes: objects, attributes, calls, a dictionary; the best of some."""
    return min(_once() for _ in range(_TRIES)) * 1e6


def _once() -> float:
    started = time.perf_counter()
    found: dict[str, int] = {}
    for item in [_Item(number) for number in range(_ITEMS)]:
        item.add(found)
    sorted(found.items(), key=lambda pair: pair[1])
    return time.perf_counter() - started
