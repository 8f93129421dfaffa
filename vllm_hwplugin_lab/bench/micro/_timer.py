# SPDX-License-Identifier: Apache-2.0
"""Device time of launches, captured into a graph that is replayed between two events.

`triton.testing.do_bench_cudagraph` is similar, but only for CUDA, and cannot spoil the output of the warm-up launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

#: A launch on a set of inputs; returns its output.
Call = Callable[[], Any]

#: Least seconds of a timed replay (events resolve half a microsecond), and approximate seconds of all replays.
REPLAY, FIGURE = 2e-3, 0.04
#: Fewest and most timed replays.
REPEATS = (5, 50)
#: Most launches of a graph.
MOST_LAUNCHES = 512
#: Size of all sets of inputs in units of the L2 cache.
L2_FACTOR = 4
#: Most sets of inputs; with smaller problems a part of the reads hits L2.
MOST_SETS = 128
#: Bytes of the large copy's source. The copy moves twice as many: it reads and writes each.
LARGE = 2 << 30


class Timer:
    """Graphs and events of a device of type ``cuda`` or ``musa``."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        #: None if torch does not report it, as with torch_musa.
        self.l2_bytes: int | None = getattr(self._module.get_device_properties(device), "L2_cache_size", None)

    def sets(self, bytes_each: int, most_bytes: int) -> int:
        """Return how many sets of inputs to rotate.

        Together they exceed `L2_FACTOR` × L2; at least two if they fit.

        Args:
            bytes_each: Bytes that a launch reads and writes.
            most_bytes: Most bytes of all sets; the result is at least one set.
        """
        wanted = MOST_SETS if self.l2_bytes is None else L2_FACTOR * self.l2_bytes // max(bytes_each, 1) + 1
        return max(1, min(max(2, wanted), MOST_SETS, most_bytes // max(bytes_each, 1)))

    def measure(self, calls: Sequence[Call], poison: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], Any]:
        """Time a launch, in rotation over ``calls``.

        Args:
            calls: The launch on each set of inputs. Each runs twice before the timing: the first run may compile.
            poison: Called before the timed launches, to spoil the output of the earlier launches.

        Returns:
            Fields of the results file: seconds of a launch (median, fastest and slowest replay), ``launches`` of a
            replay, ``repeats`` and ``sets``; and the output of the last timed launch.

        Raises:
            Exception: A call fails, or cannot be captured.
        """
        rotation, written = list(calls), None

        def launch() -> None:
            nonlocal written
            for call in rotation:
                written = call()

        self._seconds(launch, 1)
        rough = self._seconds(launch, 1)[0]
        rounds = min(math.ceil(REPLAY / max(rough, 1e-9)), MOST_LAUNCHES // len(calls))
        rotation *= max(rounds, 1)
        replay = self._capture(launch)
        poison()
        first = self._seconds(replay, 1)[0]
        repeats = max(REPEATS[0], min(REPEATS[1], int(FIGURE / max(first, 1e-9))))
        times = [seconds / len(rotation) for seconds in self._seconds(replay, repeats)]
        facts = {"seconds": statistics.median(times), "fastest": min(times), "slowest": max(times)}
        return {**facts, "launches": len(rotation), "repeats": repeats, "sets": len(calls)}, written

    def _capture(self, launch: Callable[[], object]) -> Callable[[], object]:
        # CUDAGraph, or torch_musa's MUSAGraph.
        graph: Any = getattr(self._module, f"{self.device.type.upper()}Graph")()
        with self._module.graph(graph):
            launch()
        replay: Callable[[], object] = graph.replay
        return replay

    def _seconds(self, replay: Callable[[], object], repeats: int) -> list[float]:
        """Run ``replay`` repeatedly, and return the device time of each run."""
        pairs = [[self._module.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            replay()
            end.record()
        self._module.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


class Copies:
    """Times of device-to-device copies between two buffers of random numbers; each size is measured once.

    The faster of PyTorch's ``copy_`` and an elementwise kernel (``neg``) counts, so that neither the copy engine's
    latency nor a slow kernel distorts the reference.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._source, self._target = (torch.randn(LARGE // 4, device=timer.device) for _ in range(2))
        self._known: dict[int, float] = {}

    def bandwidth(self) -> float:
        """Return the large copy's bytes read and written per second."""
        seconds = self.seconds(2 * LARGE)
        assert seconds is not None  # the buffers are of that size
        return 2 * LARGE / seconds

    def seconds(self, moved: int) -> float | None:
        """Return a copy's time for ``moved / 2`` bytes, or None.

        None: the buffers are too small.
        """
        if moved > 2 * LARGE:
            return None
        if moved not in self._known:
            elements = max(moved // 8, 1)
            # Each copy begins at a multiple of 256 bytes.
            step = -(-elements // 64) * 64
            count = max(1, min(self._timer.sets(moved, 2 * LARGE), len(self._source) // step))
            parts = [
                (self._source[at : at + elements], self._target[at : at + elements])
                for at in range(0, count * step, step)
            ]
            ways = (lambda source, target: target.copy_(source)), (lambda source, target: torch.neg(source, out=target))
            figures = [self._timer.measure([partial(way, *part) for part in parts])[0] for way in ways]
            self._known[moved] = min(figure["seconds"] for figure in figures)
        return self._known[moved]
