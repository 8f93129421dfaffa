# SPDX-License-Identifier: Apache-2.0
"""Time on the device: launches are captured into a graph, which is replayed between two events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_hwplugin.errors import HwpluginError


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


#: One launch on one set of inputs; returns what it wrote.
Call = Callable[[], Any]


class NotCapturable(HwpluginError):
    """A launch that cannot be part of a graph."""


class Timer(Protocol):
    """What ``measure`` asks of a device."""

    def capture(self, calls: Sequence[Call]) -> tuple[Callable[[], object], Any]:
        """Make one replay of all ``calls``, and what the last of them returned.

        Raises:
            NotCapturable: one of them cannot be captured.
        """

    def seconds(self, replay: Callable[[], object], repeats: int) -> list[float]:
        """Run ``replay`` so often and return the device's time of each, when all are done."""


@dataclass(frozen=True)
class Measured:
    """A timing, and what the last timed launch on the last set of inputs wrote.

    Attributes:
        eager: None where a graph was replayed; else why not. Times then include what the host needs for a launch.
    """

    timing: Timing
    output: Any
    eager: str | None


def measure(
    timer: Timer, calls: Sequence[Call], effort: Effort, poison: Callable[[], object] = lambda: None
) -> Measured:
    """Time one launch, in rotation over ``calls``.

    Args:
        timer: the device.
        calls: the launch on each set of inputs. Each is run twice before anything is timed: the first run may compile.
        effort: how much time to spend.
        poison: called before the timed launches, to spoil what the earlier ones have written.
    """

    def once() -> Any:
        output = None
        for call in calls:
            output = call()
        return output

    timer.seconds(once, 1)
    rough = timer.seconds(once, 1)[0] / len(calls)
    count = launches(rough, len(calls), effort)
    rotation = [*calls] * (count // len(calls))
    last: list[Any] = [None]

    def one_by_one() -> None:
        for call in rotation:
            last[0] = call()

    replay: Callable[[], object] = one_by_one
    eager = None
    try:
        replay, last[0] = timer.capture(rotation)
    except NotCapturable as error:
        eager = str(error)
    poison()
    first = timer.seconds(replay, 1)[0]
    times = timer.seconds(replay, repeats(first, effort))
    return Measured(summary(times, count), last[0], eager)


class GraphTimer:
    """Graphs and events of the current device.

    Args:
        device_type: ``cuda`` or ``musa``.
    """

    def __init__(self, device_type: str) -> None:
        import torch

        self._device: Any = torch.get_device_module(device_type)
        # CUDAGraph, or torch_musa's MUSAGraph.
        self._graph = getattr(self._device, f"{device_type.upper()}Graph")

    def capture(self, calls: Sequence[Call]) -> tuple[Callable[[], object], Any]:
        graph, output = self._graph(), None
        try:
            with self._device.graph(graph):
                for call in calls:
                    output = call()
        except Exception as error:  # whatever a rival raises: it is then timed without a graph, and the cell says why
            self._device.synchronize()
            raise NotCapturable(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return graph.replay, output

    def seconds(self, replay: Callable[[], object], repeats: int) -> list[float]:
        pairs = [[self._device.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            replay()
            end.record()
        self._device.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]
