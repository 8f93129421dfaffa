# SPDX-License-Identifier: Apache-2.0
"""A launch and a plain copy on this device: the bandwidth of a large copy, and the floor for small ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from . import _timer
from ._timer import Call, Effort, Timer, measure

#: Bytes of the large copy's source. It moves twice as many: each is read and written.
LARGE = 2 << 30
_ALIGNMENT = 256


class Copies:
    """Times of device-to-device copies within two buffers of random numbers, each size measured once.

    The faster of PyTorch's ``copy_`` and of an elementwise kernel (``neg``) counts, so that neither the copy engine's
    latency nor a slow kernel makes the yardstick short.
    """

    def __init__(self, timer: Timer, device: Any, l2_bytes: int | None, effort: Effort, large: int = LARGE) -> None:
        import torch

        self.device, self.l2_bytes = device, l2_bytes
        self._timer, self._effort, self._large = timer, effort, large
        self._source = torch.randn(large // 4, dtype=torch.float32, device=device)
        self._target = torch.randn(large // 4, dtype=torch.float32, device=device)
        self._known: dict[int, float] = {}

    def sets(self, bytes_each: int, room: int) -> int:
        """How many sets of inputs to rotate, as ``_timer.sets``."""
        return _timer.sets(bytes_each, self.l2_bytes, room, self._effort)

    def compared(
        self, calls: Sequence[Call], moved: int, poison: Callable[[], object] = lambda: None
    ) -> tuple[dict[str, Any], Any]:
        """What the results file says of the time of a launch that moves so many bytes, and what the last one wrote.

        Args:
            calls, poison: as of ``_timer.measure``.
        """
        done = measure(self._timer, calls, self._effort, poison)
        facts = {"sets": len(calls), "eager": done.eager, "copy_seconds": self.seconds(moved)}
        return dataclasses.asdict(done.timing) | facts, done.output

    def bandwidth(self) -> float:
        """Bytes read and written a second, by the large copy."""
        moved = 2 * self._large
        seconds = self.seconds(moved)
        assert seconds is not None  # the buffers are of that size
        return moved / seconds

    def seconds(self, moved: int) -> float | None:
        """Of a copy that reads ``moved / 2`` bytes and writes as many; None where the buffers are too small."""
        if moved > 2 * self._large:
            return None
        if moved not in self._known:
            self._known[moved] = self._measure(moved)
        return self._known[moved]

    def known(self) -> list[dict[str, float]]:
        return [{"bytes": moved, "seconds": seconds} for moved, seconds in sorted(self._known.items())]

    def _measure(self, moved: int) -> float:
        import torch

        half = max(moved // 2 // 4, 1)
        step = -(-half * 4 // _ALIGNMENT) * _ALIGNMENT // 4
        count = min(self.sets(moved, 2 * self._large), max(1, self._large // 4 // step))
        parts = [
            (self._source[at : at + half], self._target[at : at + half])
            for at in range(0, count * step, step)
            if at + half <= self._source.numel()
        ]

        def copied(source: Any, target: Any) -> Any:
            return lambda: target.copy_(source)

        def negated(source: Any, target: Any) -> Any:
            return lambda: torch.neg(source, out=target)

        ways = [[way(*part) for part in parts] for way in (copied, negated)]
        return min(measure(self._timer, calls, self._effort).timing.seconds for calls in ways)
