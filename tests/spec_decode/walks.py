# SPDX-License-Identifier: Apache-2.0
"""Walks through what can happen to the requests of an engine, with graphs and without: nothing may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from vllm.sampling_params import StructuredOutputsParams

from vllm_hwplugin.patching import load_catalogue

from . import recording, streams
from .engines import BLOCK, MAX_REQS, VOCAB
from .v2.released_modules import Graph, capture

#: Leaves vLLM's own text as it is.
UNPATCHED = {feature.gate: "off" for feature in load_catalogue().features}
#: What requests ask of the sampler: nothing that all graphs do not know, top-k and top-p, and what none knows.
PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.6, "seed": 5}]
BEST: list[dict[str, Any]] = [
    {"temperature": 0.6, "seed": 7, "top_k": 4},
    {"temperature": 0.9, "seed": 9, "top_k": 9, "top_p": 0.7},
    {"temperature": 0.9, "seed": 15, "top_p": 0.7},
]
MORE: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="a")},
]


class Sides:
    """vLLM without graphs and with them, which are called alike.

    Args:
        stock: an `Engine` that also has `state` and `without_graphs`.
        graphs: the same.

    Attributes:
        replays: how often each graph of either side was replayed, in the steps so far.
    """

    def __init__(self, stock: Any, graphs: Any) -> None:
        self.both = (stock, graphs)
        self._first = [[part.clone() for part in (model.embed, model.head)] for model in stock.models]
        self.replays: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        """Begin a walk, which goes by itself alone."""
        self._names = self._steps = 0
        for side in self.both:
            side.restart()

    def step(self) -> None:
        replays, stock, graphs = [], *self.both
        self._steps += 1
        for side in self.both:
            Graph.replayed.clear()
            with torch.random.fork_rng():
                torch.manual_seed(self._steps)
                side.step()
            replays.append(len(Graph.replayed))
        assert (stock.scheduled is None) == (graphs.scheduled is None)
        if stock.executed is not None:
            assert graphs.scheduled.num_scheduled_tokens == stock.scheduled.num_scheduled_tokens
            assert graphs.scheduled.scheduled_spec_decode_tokens == stock.scheduled.scheduled_spec_decode_tokens
            assert graphs.given == stock.given
            self.replays.append((replays[0], replays[1]))
        assert graphs.state() == stock.state()
        assert graphs.sampled == stock.sampled

    def finish(self) -> None:
        while self.both[0].scheduler.has_requests():
            self.step()

    def add(self, name: str | None = None, **request: Any) -> None:
        self._names += 1
        for side in self.both:
            side.add(name or f"{self._names:04}", **request)

    def abort(self, number: int) -> None:
        for name in list(self.both[0].scheduler.requests)[number : number + 1]:
            for side in self.both:
                side.abort(name)

    def come_again(self, number: int) -> None:
        """Abort a request, and add another of its name when vLLM has seen the last output of the first."""
        for name in list(self.both[0].scheduler.requests)[number : number + 1]:
            self.abort(number)
            self.step()
            self.step()
            self.add(name, prompt=[number, 1, 2], max_tokens=9, temperature=0.0)

    def preempt(self, number: int) -> None:
        for side in self.both:
            side.preempt()

    def draft_less(self, number: int) -> None:
        drafts = self.both[0].drafts
        for count in (number % drafts, drafts) if drafts else ():
            for side in self.both:
                side.draft(count)
            if count < drafts:
                self.step()

    def step_without_graphs(self, number: int) -> None:
        stock, graphs = self.both
        with stock.without_graphs(), graphs.without_graphs():
            self.step()

    def make_dummy_batch(self, number: int) -> None:
        for side in self.both:
            side.runner._dummy_run((1 + number % MAX_REQS) * (1 + side.drafts), uniform_decode=True)

    def load_weights(self, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        changes = [[0.1 * torch.randn(part.shape, generator=chance) for part in parts] for parts in self._first]
        for side in self.both:
            for model, parts, change in zip(side.models, self._first, changes, strict=True):
                model.embed.copy_(parts[0] + change[0])
                model.head.copy_(parts[1] + change[1])

    def move_weights(self) -> None:
        """Put other weights of the head elsewhere, which only vLLM follows."""
        for side in self.both:
            for model in side.models:
                model.lm_head.weight = torch.nn.Parameter(model.head.flip(1), requires_grad=False)


HAPPENINGS = [
    Sides.abort,
    Sides.come_again,
    Sides.preempt,
    Sides.draft_less,
    Sides.step_without_graphs,
    Sides.make_dummy_batch,
    Sides.load_weights,
]


def walk(sides: Sides, kinds: list[dict[str, Any]], examples: int = 40) -> int:
    """Serve a request of each kind, then go many ways; compare after each step. Return how many ways.

    Args:
        kinds: what requests ask of the sampler.
        examples: how many ways; no more than Hypothesis' profile has.
    """
    examples = min(examples, settings().max_examples)
    for kind in kinds:
        sides.add(prompt=[1, 2], max_tokens=6, **kind)
    sides.finish()
    sides.restart()
    requests = st.builds(
        lambda prompt, tokens, kind: {"prompt": prompt, "max_tokens": tokens, **kind},
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2 * BLOCK),
        st.sampled_from((2, 9, 20, 40)),
        st.sampled_from(kinds),
    )

    class Requests(RuleBasedStateMachine):
        going: ClassVar[Sides] = sides

        @initialize(requests=st.lists(requests, min_size=1, max_size=4))
        def begin(self, requests: list[dict[str, Any]]) -> None:
            for request in requests:
                self.going.add(**request)

        @rule(request=requests)
        def add(self, request: dict[str, Any]) -> None:
            self.going.add(**request)

        @rule(count=st.integers(1, 6))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.going.step()

        @rule(what=st.sampled_from(HAPPENINGS), number=st.integers(0, 5))
        def happen(self, what: Callable[[Sides, int], None], number: int) -> None:
            what(self.going, number)

        def teardown(self) -> None:
            self.going.restart()

    run_state_machine_as_test(
        Requests,
        settings=settings(max_examples=examples, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
    return examples


def live_load(sides: Sides, kinds: list[dict[str, Any]] = PLAIN + BEST[:2]) -> None:
    """Requests come while others decode, with a prompt in chunks; one is aborted, and all are preempted once."""
    for number, length in enumerate((5, 1, 30, 8, 2, 11)):
        prompt = [(3 * number + place) % VOCAB for place in range(length)]
        sides.add(prompt=prompt, max_tokens=9, **kinds[number % len(kinds)])
        for _ in range(2):
            sides.step()
    sides.abort(1)
    sides.preempt(0)
    sides.finish()


@contextmanager
def host_of_graphs() -> Iterator[pytest.MonkeyPatch]:
    """While it lasts, torch has graphs that are written down, and streams."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.capturing is not None)
        # Numbers that vLLM has on the host look like the device's here.
        monkeypatch.setattr(recording, "_HOST_READS", ())
        streams.stand_in(monkeypatch)
        yield monkeypatch
