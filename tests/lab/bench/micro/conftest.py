"""A device whose clock is made up: each launch takes what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_hwplugin_lab.bench.micro._timer import Effort, NotCapturable


class FakeTimer:
    """Runs the calls for real and moves its clock by `cost` for each; the first run of a call costs `compile` more."""

    def __init__(self, cost: float = 1e-3, compile_cost: float = 0.0, refuse: str | None = None) -> None:
        self.cost, self.compile_cost, self.refuse = cost, compile_cost, refuse
        self.now = 0.0
        self.launched: list[Any] = []
        self.captured = 0

    def launch(self, call: Callable[[], Any]) -> Any:
        self.now += self.cost + (self.compile_cost if call not in self.launched else 0.0)
        self.launched.append(call)
        return call()

    def wrapped(self, calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """The calls as this device sees them launched."""
        return [lambda call=call: self.launch(call) for call in calls]

    def capture(self, calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], object], Any]:
        if self.refuse is not None:
            raise NotCapturable(self.refuse)
        self.captured = len(calls)

        def replay() -> None:
            for call in calls:
                call()

        before = self.now
        output = None
        for call in calls:
            output = call()
        self.now = before  # a capture runs nothing
        return replay, output

    def seconds(self, replay: Callable[[], object], repeats: int) -> list[float]:
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
def quick() -> Effort:
    """Few launches of everything."""
    return Effort(replay=1e-9, cell=1e-9, least=2, most=2, most_sets=3, most_launches=6)
