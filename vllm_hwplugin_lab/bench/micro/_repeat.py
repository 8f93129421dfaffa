# SPDX-License-Identifier: Apache-2.0
"""How often a kernel is launched, over how many sets of inputs, and what is made of the times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How much a figure may cost; times in seconds.

    Attributes:
        replay: one timed replay lasts at least that long: events resolve half a microsecond.
        cell: all timed replays of one figure last about that long.
        least: replays at least, however long one is.
        most: replays at most, however short one is.
        l2_factor: the rotated sets are together larger than the L2 cache so many times.
        most_sets: sets at most; small problems whose sets are smaller in sum are served by L2 in part.
        most_launches: launches in one graph at most.
    """

    replay: float = 2e-3
    cell: float = 0.04
    least: int = 5
    most: int = 50
    l2_factor: int = 4
    most_sets: int = 128
    most_launches: int = 512


@dataclass(frozen=True)
class Timing:
    """Seconds of one launch: the median over the replays, the fastest and the slowest replay."""

    seconds: float
    fastest: float
    slowest: float
    launches: int
    repeats: int


def sets(bytes_each: int, l2_bytes: int | None, room: int, effort: Effort) -> int:
    """How many sets of inputs to rotate: more than ``l2_factor`` times L2 in sum, two at least if they fit.

    Args:
        bytes_each: what one launch reads and writes.
        l2_bytes: size of the L2 cache; None where the device does not say it, and as many sets are taken as may be.
        room: bytes that all sets together may take; one set is taken even where it is larger.
    """
    wanted = effort.most_sets if l2_bytes is None else effort.l2_factor * l2_bytes // max(bytes_each, 1) + 1
    fitting = room // max(bytes_each, 1)
    return max(1, min(max(2, wanted), effort.most_sets, fitting))


def launches(seconds: float, count: int, effort: Effort) -> int:
    """Launches in one replay: whole rounds over ``count`` sets, so that every set is launched equally often."""
    rounds = math.ceil(effort.replay / max(seconds * count, 1e-9))
    return count * max(1, min(rounds, effort.most_launches // count))


def repeats(replay_seconds: float, effort: Effort) -> int:
    return max(effort.least, min(effort.most, int(effort.cell / max(replay_seconds, 1e-9))))


def summary(times: Sequence[float], count: int) -> Timing:
    """The seconds of one launch, from those of replays of ``count`` launches each."""
    each = [time / count for time in times]
    return Timing(statistics.median(each), min(each), max(each), count, len(each))
