# SPDX-License-Identifier: Apache-2.0
"""Graphs of a step's inputs and tail, beside vLLM without them, over the scheduler's own order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.sampling_params import StructuredOutputsParams

from vllm_hwplugin import gates

from .. import recorded_graph, streams
from . import plain_triton
from .released_modules import Graph, ReleasedModules, capture, jit
from .scheduled_runner import BLOCK, MAX_REQS, STAND_INS, VOCAB, Side, read_by_the_plugin

VERSION, DRAFTS = "0.32.0", 2
UNPATCHED = {gate.name: "off" for gate in gates.GATES if gate.switches and "patches" in gate.affects}
#: What requests ask of the sampler.
FOR_GRAPHS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.6, "seed": 5},
    {"temperature": 0.6, "seed": 7, "top_k": 4},
    {"temperature": 0.9, "seed": 9, "top_k": 9, "top_p": 0.7},
]
FOR_VLLM: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="a")},
]


class Sides:
    """vLLM without graphs and with them, which are called alike."""

    def __init__(self, stock: Side, graphs: Side) -> None:
        self.both = (stock, graphs)
        self._first = [[part.clone() for part in (model.embed, model.head)] for model in stock.models]
        self.count = self.served = self.steady = 0

    def step(self) -> None:
        replays = []
        for side in self.both:
            Graph.replayed.clear()
            side.step()
            replays.append(len(Graph.replayed))
        stock, graphs = self.both
        assert (stock.scheduled is None) == (graphs.scheduled is None)
        if stock.batch is not None:
            assert graphs.inputs() == stock.inputs()
            self.served += graphs.runner.tail_graphs.held is not None
            self.steady += replays[1] > replays[0]
        assert graphs.state() == stock.state()
        assert graphs.sampled == stock.sampled

    def add(self, **request: Any) -> None:
        self.count += 1
        for side in self.both:
            side.add(f"{self.count:04}", **request)

    def abort(self, number: int) -> None:
        for name in list(self.both[0].scheduler.requests)[number : number + 1]:
            for side in self.both:
                side.abort(name)

    def preempt(self, number: int) -> None:
        for side in self.both:
            side.preempt()

    def draft_less(self, number: int) -> None:
        for count in (number % DRAFTS, DRAFTS):
            for side in self.both:
                side.draft(count)
            if count < DRAFTS:
                self.step()

    def step_without_graphs(self, number: int) -> None:
        stock, graphs = self.both
        with stock.without_graphs(), graphs.without_graphs():
            self.step()

    def make_dummy_batch(self, number: int) -> None:
        for side in self.both:
            side.runner._dummy_run((1 + number % MAX_REQS) * (1 + DRAFTS), uniform_decode=True)

    def load_weights(self, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        changes = [[0.1 * torch.randn(part.shape, generator=chance) for part in parts] for parts in self._first]
        for side in self.both:
            for model, parts, change in zip(side.models, self._first, changes, strict=True):
                model.embed.copy_(parts[0] + change[0])
                model.head.copy_(parts[1] + change[1])


HAPPENINGS = [
    Sides.abort,
    Sides.preempt,
    Sides.draft_less,
    Sides.step_without_graphs,
    Sides.make_dummy_batch,
    Sides.load_weights,
]
REQUESTS = st.builds(
    lambda prompt, tokens, kind: {"prompt": prompt, "max_tokens": tokens, **kind},
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2 * BLOCK),
    st.sampled_from((2, 9, 20, 40)),
    st.sampled_from(3 * FOR_GRAPHS + FOR_VLLM),
)


class Requests(RuleBasedStateMachine):
    """What happens to an engine."""

    sides: ClassVar[Sides]

    @initialize(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def begin(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.sides.add(**request)

    @rule(request=REQUESTS)
    def add(self, request: dict[str, Any]) -> None:
        self.sides.add(**request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.sides.step()

    @rule(what=st.sampled_from(HAPPENINGS), number=st.integers(0, 5))
    def happen(self, what: Callable[[Sides, int], None], number: int) -> None:
        what(self.sides, number)

    def teardown(self) -> None:
        for side in self.sides.both:
            side.restart()


@pytest.fixture(scope="module")
def sides(vllm_tree: Callable[[str], Any]) -> Iterator[Sides]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.capturing is not None)
        # Numbers that vLLM has on the host look like the device's here.
        monkeypatch.setattr(recorded_graph, "_HOST_READS", ())
        streams.stand_in(monkeypatch)
        kernels = {"language": plain_triton.LANGUAGE, "jit": partial(jit, make=plain_triton.Kernel)}
        stock, patched = (
            ReleasedModules(vllm_tree(VERSION), STAND_INS, **kernels, **choices) for choices in (UNPATCHED, {})
        )
        read_by_the_plugin(patched, monkeypatch)
        yield Sides(Side(stock, DRAFTS), Side(patched, DRAFTS))


def test_nothing_differs_whatever_happens_to_requests(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "sides", sides, raising=False)
    run_state_machine_as_test(
        Requests,
        settings=settings(max_examples=40, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
    # The walks lead there.
    assert sides.steady > 100
    assert sides.served > sides.steady + 50
