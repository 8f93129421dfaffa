"""A device whose clock is made up: each launch takes what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _timer


class FakeTimer(_timer.Timer):
    """Runs launches for real and moves its clock by `cost` for each; the first run of a call costs `compile` more."""

    def __init__(self, cost: float = 1e-3, compile_cost: float = 0.0, l2_bytes: int | None = 1 << 10) -> None:
        self.device, self.l2_bytes = torch.device("cpu"), l2_bytes
        self.cost, self.compile_cost = cost, compile_cost
        self.now = 0.0
        self.launched: list[Any] = []

    def wrapped(self, calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """The calls as this device sees them launched."""

        def launch(call: Callable[[], Any]) -> Any:
            self.now += self.cost + (self.compile_cost if call not in self.launched else 0.0)
            self.launched.append(call)
            return call()

        return [lambda call=call: launch(call) for call in calls]

    def _capture(self, launch: Callable[[], object]) -> Callable[[], object]:
        before = self.now
        launch()
        self.now = before  # a capture runs nothing
        return launch

    def _seconds(self, replay: Callable[[], object], repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            start = self.now
            replay()
            found.append(self.now - start)
        return found


@pytest.fixture
def fake_timer() -> type[FakeTimer]:
    return FakeTimer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few launches of everything, and small copies."""
    for name, value in {
        "REPLAY": 1e-9,
        "REPEATS": (2, 2),
        "MOST_SETS": 3,
        "MOST_LAUNCHES": 6,
        "LARGE": 1 << 16,
    }.items():
        monkeypatch.setattr(_timer, name, value)
