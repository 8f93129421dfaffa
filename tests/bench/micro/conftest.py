"""A device whose clock is made up: each launch takes what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_hwplugin.bench.micro._repeat import Effort
from vllm_hwplugin.bench.micro._timer import NotCapturable


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


def _cells(
    seconds: Callable[[str, str], float | None], plan: Sequence[tuple[str, str]], **facts: Any
) -> list[dict[str, Any]]:
    found = []
    for kernel, case in plan:
        taken = seconds(kernel, case)
        status, reason = ("measured", None) if taken is not None else ("failed", "ValueError: no | such <shape>")
        cell = {"kernel": kernel, "case": case, "status": status, "reason": reason, "process": 0}
        if taken is not None:
            cell |= {"seconds": taken, "eager": None, "copy_seconds": taken / 2, "sets": 2, **facts}
        found.append(cell)
    return found


@pytest.fixture
def results(gpu_host: Any) -> Callable[..., dict[str, Any]]:
    """`results(kind, seconds)` is a results file in which each cell took `seconds(kernel, case)`; None: it failed."""
    from vllm_hwplugin.bench.micro import _attention_cases, _op_cases, _results

    def make(kind: str, seconds: Callable[[str, str], float | None]) -> dict[str, Any]:
        plan, facts = {
            "attention": (_attention_cases.plan(), {"error_ratio": 0.9}),
            "ops": (_op_cases.plan(), {"mismatch": None}),
        }[kind]
        process = {
            "error": None,
            "log_tail": "",
            "copy_bandwidth": 4e12,
            "l2_bytes": 60 << 20,
            "packages": {"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": None},
        }
        settings = {"seconds": 75.0, "seed": 0, "only": {"kind": ["decode"]}}
        made = _results.make(kind, gpu_host, settings, _cells(seconds, plan, **facts), [process])
        return made | {"commit": "abc123", "date": "2026-01-02T03:04:05+00:00"}

    return make
