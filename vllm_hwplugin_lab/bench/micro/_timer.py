# SPDX-License-Identifier: Apache-2.0
"""Time on the device: launches are captured into a graph, which is replayed between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_hwplugin.errors import HwpluginError

from . import _repeat
from ._repeat import Effort, Timing

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
    count = _repeat.launches(rough, len(calls), effort)
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
    times = timer.seconds(replay, _repeat.repeats(first, effort))
    return Measured(_repeat.summary(times, count), last[0], eager)


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
