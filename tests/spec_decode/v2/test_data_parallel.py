# SPDX-License-Identifier: Apache-2.0
"""Two ranks of data parallelism in lock step: graphs change nothing that ranks exchange.

Layers of experts exchange tokens in each pass. So ranks must run the same passes with the same padding, also while one
has no requests, or falls back to vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from vllm.config.compilation import CUDAGraphMode

from tests.cpu_seconds import patience
from vllm_hwplugin.spec_decode.v2 import mixed_graphs

from ..engines import DRAFTS
from ..engines import VOCAB as WORDS
from ..walks import BEST, MORE, PLAIN, UNPATCHED, host_of_graphs
from .released_modules import Graph, ReleasedModules
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin
from .test_mixed_graphs import KERNELS, SIZES_HERE, graphs_of

RANKS = 2


class Exchange:
    """Runs ranks in threads, one at a time: a rank goes on until it waits for the others."""

    def __init__(self) -> None:
        self._turn, self._all = threading.Lock(), threading.Barrier(RANKS, timeout=patience(60))
        self._parts: dict[int, torch.Tensor] = {}
        self.counts = [0] * RANKS

    def group_of(self, rank: int) -> Any:
        return SimpleNamespace(cpu_group=rank, cpu_all_reduce_=lambda tensor: self._all_reduce(rank, tensor))

    def all_reduce(self, tensor: torch.Tensor, group: int) -> None:
        """`torch.distributed.all_reduce`, which vLLM calls up to 0.32."""
        self._all_reduce(group, tensor)

    def _all_reduce(self, rank: int, tensor: torch.Tensor, reduce: Callable[..., Any] = torch.sum) -> None:
        self.counts[rank] += 1
        self._parts[rank] = tensor.clone()
        self._wait()
        tensor.copy_(reduce(torch.stack(list(self._parts.values())), 0))
        self._wait()

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._all.wait()
        finally:
            self._turn.acquire()

    def run(self, calls: list[Callable[[], None]]) -> None:
        failures: list[BaseException] = []

        def run(call: Callable[[], None]) -> None:
            with self._turn:
                try:
                    call()
                except BaseException as failure:
                    failures.append(failure)
                    self._all.abort()

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class RankSide(Side):
    """A rank, whose draft may have experts."""

    def __init__(self, modules: ReleasedModules, experts: bool, **how: Any) -> None:
        self._experts = experts
        super().__init__(modules, **how)

    def _begin(self) -> None:
        self.config.speculative_config.draft_model_config.is_moe = self._experts
        super()._begin()


class Ranks:
    """All ranks of one engine."""

    def __init__(
        self, tree: Any, monkeypatch: pytest.MonkeyPatch | None, mode: CUDAGraphMode, experts: bool, **choices: str
    ) -> None:
        self._exchange, self.sides = Exchange(), list[Side]()
        #: By rank: the passes of the last step, with their tokens.
        self.passes: list[list[Any]] = [[] for _ in range(RANKS)]
        for rank in range(RANKS):
            more = {
                "get_dp_group": lambda rank=rank: self._exchange.group_of(rank),
                "should_skip_dp_coordination": lambda: False,
            }
            modules = ReleasedModules(tree, STAND_INS | more, **KERNELS, **choices)
            vars(modules("dp_utils"))["dist"] = self._exchange
            if monkeypatch is not None:
                read_by_the_plugin(modules, monkeypatch)
            vars(modules("cudagraph_utils"))["has_compiled_submodule"] = lambda model: True
            self.sides.append(RankSide(modules, experts, mode=mode, rank=(rank, RANKS), largest=max(SIZES_HERE)))
            self._note(rank)

    def _note(self, rank: int) -> None:
        side, passes = self.sides[rank], self.passes[rank]
        for model, name in zip(side.models, ("target", "draft"), strict=True):
            model.register_forward_pre_hook(
                lambda _, args, given, name=name: passes.append((name, len(given["input_ids"]))), with_kwargs=True
            )
        speculator = side.runner.speculator
        managers = {
            "target graph": side.runner.cudagraph_manager,
            "first pass graph": speculator.prefill_cudagraph_manager,
            "steps graph": speculator.decode_cudagraph_manager,
        }
        for name, manager in managers.items():
            replay = manager.run_fullgraph

            def noted(desc: Any, *args: Any, name: str = name, replay: Any = replay) -> Any:
                passes.append((name, desc.num_tokens))
                return replay(desc, *args)

            manager.run_fullgraph = noted

    def step(self) -> None:
        def step(rank: int) -> None:
            side, before = self.sides[rank], self._exchange.counts[rank]
            side.step()
            if self._exchange.counts[rank] == before:
                # As vLLM's engine does where it has run nothing.
                side.runner._dummy_run(1 + DRAFTS, uniform_decode=True)

        for passes in self.passes:
            passes.clear()
        self._exchange.run([lambda rank=rank: step(rank) for rank in range(RANKS)])


@contextmanager
def both(tree: Any, mode: CUDAGraphMode, experts: bool = False) -> Iterator[tuple[Ranks, Ranks]]:
    """Unpatched vLLM and vLLM with the plugin."""
    with host_of_graphs() as monkeypatch:
        yield Ranks(tree, None, mode, experts, **UNPATCHED), Ranks(tree, monkeypatch, mode, experts)


def of_target(passes: list[Any]) -> list[Any]:
    return [one for one in passes if one[0].startswith("target")]


def serve(engines: tuple[Ranks, Ranks]) -> None:
    """Take a step, after which each rank has what it has without graphs."""
    stock, patched = engines
    for engine in engines:
        Graph.replayed.clear()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            engine.step()
    # The same number of exchanges on each rank, and in each engine.
    assert len({*stock._exchange.counts, *patched._exchange.counts}) == 1
    for one, other in zip(stock.sides, patched.sides, strict=True):
        assert other.state() == one.state()
        assert other.sampled == one.sampled


def compare(engines: tuple[Ranks, Ranks]) -> None:
    """Take a step with the passes of unpatched vLLM; a draft without experts exchanges nothing in its passes."""
    serve(engines)
    stock, patched = engines
    experts = stock.sides[0]._experts
    for one, other in zip(stock.passes, patched.passes, strict=True):
        assert (other == one) if experts else (of_target(other) == of_target(one))


def compare_ranks(engines: tuple[Ranks, Ranks]) -> None:
    """Take a step with the same passes on each rank."""
    serve(engines)
    one, other = engines[1].passes
    assert of_target(other) == of_target(one), "ranks differ"


def load(
    engines: tuple[Ranks, Ranks], kinds: list[dict[str, Any]], step: Callable[[tuple[Ranks, Ranks]], None] = compare
) -> None:
    """A rank gets more requests than the other, then has none; prompts come while the other decodes."""

    def add(rank: int, name: str, length: int, **request: Any) -> None:
        for engine in engines:
            prompt = [(3 * length + place) % WORDS for place in range(length)]
            engine.sides[rank].add(name, prompt, **request)

    for number, (rank, length, tokens) in enumerate(
        ((0, 5, 30), (1, 3, 9), (1, 30, 9), (0, 8, 9), (1, 2, 12), (1, 4, 12), (1, 7, 12))
    ):
        add(rank, f"{rank}-{number}", length, max_tokens=tokens, **kinds[number % len(kinds)])
        for _ in range(3):
            step(engines)
    while any(side.scheduler.has_requests() for side in engines[0].sides):
        step(engines)


def skip_where_padding_overwrites_keys(tree: Any) -> None:
    if Version(tree.version) < Version("0.29"):
        pytest.skip("unpatched vLLM has padding overwrite the first keys of a request in the draft")


@pytest.mark.each_vllm("v2-step-inputs")
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize("experts", [False, True], ids=["dense draft", "draft of experts"])
def test_ranks_run_the_same_passes_in_graphs(vllm_here: Any, mode: CUDAGraphMode, experts: bool) -> None:
    skip_where_padding_overwrites_keys(vllm_here)
    drafts = not experts and Version(vllm_here.version) >= Version("0.30")
    with both(vllm_here, mode, experts) as engines:
        load(engines, PLAIN + BEST + MORE)
        for side in engines[1].sides:
            tail, inputs = side.runner.tail_graphs, side.runner.step_inputs
            assert tail._sampling.outcomes()["served"] > 5
            assert inputs._step_counts.outcomes()["served"] > 5
            assert (tail._drafting.outcomes().get("served", 0) > 5) is drafts


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_ranks_replay_the_same_graph_of_a_mixed_batch(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if Version(vllm_here.version) < Version("0.33"):
        pytest.skip("vLLM drafts for all requests that the graph holds")
    monkeypatch.setattr(mixed_graphs, "SIZES", (*SIZES_HERE, 40))
    with both(vllm_here, CUDAGraphMode.FULL_AND_PIECEWISE) as engines:
        assert [graphs_of(side)["target"] for side in engines[1].sides] == RANKS * [{*SIZES_HERE}]
        replays: set[int] = set()

        def step(engines: tuple[Ranks, Ranks]) -> None:
            compare_ranks(engines)
            passes = of_target(engines[1].passes[0])
            assert all(name == "target graph" for name, _ in passes)
            replays.update(tokens for _, tokens in passes)

        load(engines, PLAIN + BEST, step)
        assert replays & {*SIZES_HERE}


@pytest.mark.each_vllm("v2-step-inputs")
def test_a_batch_is_served_at_the_padding_of_another_ranks(vllm_here: Any) -> None:
    with both(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as engines:
        for rank, count in ((0, 1), (1, 3)):
            for number in range(count):
                for engine in engines:
                    engine.sides[rank].add(f"{rank}-{number}", [1 + number, 2], max_tokens=12, temperature=0.0)
        for _ in range(4):
            compare(engines)
        assert engines[1].passes[0][0] == ("target graph", 4 * (1 + DRAFTS))
        counts = engines[1].sides[0].runner.step_inputs._step_counts.outcomes()
        assert counts["served"] > 1
