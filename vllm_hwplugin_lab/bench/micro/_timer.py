# SPDX-License-Identifier: Apache-2.0
"""Time on the device: launches are captured into a graph, which is replayed between two events.

`triton.testing.do_bench_cudagraph` does the like, but for CUDA alone, and gives no chance to spoil what the warm
launches wrote.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

#: One launch on one set of inputs; returns what it wrote.
Call = Callable[[], Any]

#: Seconds that one timed replay lasts at least (events resolve half a microsecond), and all of a figure's about.
REPLAY, FIGURE = 2e-3, 0.04
#: Timed replays, however long or short one is.
REPEATS = (5, 50)
#: Launches in one graph at most.
MOST_LAUNCHES = 512
#: The rotated sets of inputs are together larger than the L2 cache so many times...
L2_FACTOR = 4
#: ...but no more than so many: small problems whose sets are smaller in sum are served by L2 in part.
MOST_SETS = 128
#: Bytes of the large copy's source. It moves twice as many: each is read and written.
LARGE = 2 << 30


class Timer:
    """Graphs and events of a device.

    Args:
        device: of type ``cuda`` or ``musa``.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        #: None where the device does not say it, as torch_musa's.
        self.l2_bytes: int | None = getattr(self._module.get_device_properties(device), "L2_cache_size", None)

    def sets(self, bytes_each: int, room: int) -> int:
        """How many sets of inputs to rotate: more than `L2_FACTOR` times L2 in sum, two at least if they fit.

        Args:
            bytes_each: what one launch reads and writes.
            room: bytes that all sets together may take; one set is taken even where it is larger.
        """
        wanted = MOST_SETS if self.l2_bytes is None else L2_FACTOR * self.l2_bytes // max(bytes_each, 1) + 1
        return max(1, min(max(2, wanted), MOST_SETS, room // max(bytes_each, 1)))

    def measure(self, calls: Sequence[Call], poison: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], Any]:
        """Time one launch, in rotation over ``calls``, each of which is launched equally often.

        Args:
            calls: the launch on each set of inputs. Each is run twice before anything is timed: the first run may
                compile.
            poison: called before the timed launches, to spoil what the earlier ones have written.

        Returns:
            What the results file says: seconds of one launch (the median over the replays, the fastest and the slowest
            replay), ``launches`` in a replay, ``repeats``, and ``sets``. Beside it what the last timed launch wrote.

        Raises:
            Exception: one of the calls fails, or cannot be part of a graph.
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
        times = [one / len(rotation) for one in self._seconds(replay, repeats)]
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
        """Run ``replay`` so often and return the device's time of each, when all are done."""
        pairs = [[self._module.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            replay()
            end.record()
        self._module.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


class Copies:
    """Times of device-to-device copies within two buffers of random numbers, each size measured once.

    The faster of PyTorch's ``copy_`` and of an elementwise kernel (``neg``) counts, so that neither the copy engine's
    latency nor a slow kernel makes the yardstick short.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._source, self._target = (torch.randn(LARGE // 4, device=timer.device) for _ in range(2))
        self._known: dict[int, float] = {}

    def bandwidth(self) -> float:
        """Bytes read and written a second, by the large copy."""
        seconds = self.seconds(2 * LARGE)
        assert seconds is not None  # the buffers are of that size
        return 2 * LARGE / seconds

    def seconds(self, moved: int) -> float | None:
        """Of a copy that reads ``moved / 2`` bytes and writes as many; None where the buffers are too small."""
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
            self._known[moved] = min(one["seconds"] for one in figures)
        return self._known[moved]
