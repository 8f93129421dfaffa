# SPDX-License-Identifier: Apache-2.0
"""Two ranks of data parallelism in lock step: graphs change nothing that ranks exchange.

Layers of experts exchange tokens in each pass. So ranks must run the same passes with the same padding, also while one
has no requests, or falls back to vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed import ReduceOp
from vllm.config.compilation import CUDAGraphMode

from tests.cpu_seconds import patience
from vllm_hwplugin.base.gates import MORE_GRAPHS
from vllm_hwplugin.spec_decode import graph_recording, ranks
from vllm_hwplugin.spec_decode.ranks import Beyond
from vllm_hwplugin.spec_decode.v2 import mixed_graphs, tail_capture, tail_graph
from vllm_hwplugin.spec_decode.v2.tail_capture import TailRecorder

from ..engines import DRAFTS, MAX_REQS
from ..engines import VOCAB as WORDS
from ..walks import BEST, MORE, PLAIN, UNPATCHED, host_of_graphs
from .released_modules import Graph, ReleasedModules
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin
from .test_mixed_graphs import SIZES_HERE, graphs_of

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


class Votes(Exchange):
    """What the ranks of a group ask each other while they start.

    Args:
        group: `get_dp_group` or `get_pp_group`.
    """

    def __init__(self, group: str = "get_dp_group") -> None:
        super().__init__()
        self._group, self._rank = group, threading.local()

    def start(self, starts: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
        def group() -> Any:
            return SimpleNamespace(world_size=RANKS, cpu_group=self._rank.number)

        def all_reduce(values: torch.Tensor, op: Any, group: int) -> None:
            self._all_reduce(group, values, {ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax}[op])

        def begin(number: int, start: Callable[[], None]) -> None:
            self._rank.number = number
            start()

        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", all_reduce)
            patch.setattr(ranks, "model_parallel_is_initialized", lambda: True)
            for module in (ranks, graph_recording):
                patch.setattr(module, "tensor_parallel", lambda: False)
            # It sets a variable of the process, and all ranks are in one process here.
            patch.setattr(graph_recording, "kept_kernels", nullcontext)
            for name in ("get_pp_group", "get_dp_group"):
                patch.setattr(ranks, name, lambda: SimpleNamespace(world_size=1))
            patch.setattr(ranks, self._group, group)
            self.run([partial(begin, number, start) for number, start in enumerate(starts)])

    def here(self) -> int:
        """The rank that is starting."""
        number: int = self._rank.number
        return number


class RankSide(Side):
    """A rank, whose draft may have experts."""

    def __init__(self, modules: ReleasedModules, experts: bool, **how: Any) -> None:
        self._experts = experts
        self._sent, self._end = torch.zeros(64, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        super().__init__(modules, **how)

    def _begin(self) -> None:
        draft = self.models[1]
        if not draft._forward_pre_hooks:
            draft.register_forward_pre_hook(self._send, with_kwargs=True)
        self.config.speculative_config.draft_model_config.is_moe = self._experts
        super()._begin()

    def _send(self, _: Any, args: Any, given: dict[str, Any]) -> None:
        # On the device, as layers of experts do: a graph has it, too.
        self._sent.scatter_(0, self._end, len(given["input_ids"]))
        self._end.add_(1)

    def step(self) -> None:
        self._end.zero_()
        super().step()

    def exchanged(self) -> list[int]:
        """The tokens of each draft pass of the last step."""
        return self._sent[: int(self._end)].tolist()


class Ranks:
    """All ranks of one engine."""

    def __init__(
        self, tree: Any, votes: Votes | None, monkeypatch: pytest.MonkeyPatch, experts: bool, **how: Any
    ) -> None:
        self._exchange, self._drafts = Exchange(), how["drafts"]
        self.sides: list[Any] = [None] * RANKS
        #: By rank: the target's passes of the last step, with their tokens.
        self.passes: list[list[Any]] = [[] for _ in range(RANKS)]
        starts = []
        for rank in range(RANKS):
            more = {
                "get_dp_group": lambda rank=rank: self._exchange.group_of(rank),
                "should_skip_dp_coordination": lambda: False,
            }
            modules = ReleasedModules(tree, STAND_INS | more, **({} if votes else UNPATCHED))
            vars(modules("dp_utils"))["dist"] = self._exchange
            if votes:
                read_by_the_plugin(modules, monkeypatch)
            vars(modules("cudagraph_utils"))["has_compiled_submodule"] = lambda model: True
            starts.append(partial(self._start, rank, modules, experts, **how))
        if votes:
            votes.start(starts, monkeypatch)
        else:
            for start in starts:
                start()

    def _start(self, rank: int, modules: ReleasedModules, experts: bool, **how: Any) -> None:
        side = self.sides[rank] = RankSide(modules, experts, rank=(rank, RANKS), largest=max(SIZES_HERE), **how)
        passes, manager = self.passes[rank], side.runner.cudagraph_manager
        side.models[0].register_forward_pre_hook(
            lambda _, args, given: passes.append(("target", len(given["input_ids"]))), with_kwargs=True
        )
        replay = manager.run_fullgraph

        def noted(desc: Any, *args: Any) -> Any:
            passes.append(("target graph", desc.num_tokens))
            return replay(desc, *args)

        manager.run_fullgraph = noted

    def step(self) -> None:
        def step(rank: int) -> None:
            side, before = self.sides[rank], self._exchange.counts[rank]
            side.step()
            if self._exchange.counts[rank] == before:
                # As vLLM's engine does where it has run nothing.
                side.runner._dummy_run(1 + self._drafts, uniform_decode=True)

        for passes in self.passes:
            passes.clear()
        self._exchange.run([lambda rank=rank: step(rank) for rank in range(RANKS)])


@contextmanager
def both(
    tree: Any, mode: CUDAGraphMode, experts: bool = False, drafts: int = DRAFTS, votes: Votes | None = None
) -> Iterator[tuple[Ranks, Ranks]]:
    """Unpatched vLLM, and vLLM with the plugin, whose ranks ask each other by `votes`."""
    with host_of_graphs() as monkeypatch:
        monkeypatch.setenv(MORE_GRAPHS, "shared-experts")
        made = (Ranks(tree, one, monkeypatch, experts, mode=mode, drafts=drafts) for one in (None, votes or Votes()))
        yield next(made), next(made)


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
    assert patched.passes == stock.passes
    if stock.sides[0]._experts:
        exchanged = [[side.exchanged() for side in engine.sides] for engine in engines]
        assert exchanged[1] == exchanged[0], "ranks exchange other tokens"


def compare_ranks(engines: tuple[Ranks, Ranks]) -> None:
    """Take a step with the same passes on each rank."""
    serve(engines)
    one, other = engines[1].passes
    assert other == one, "ranks differ"


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
@pytest.mark.parametrize(
    ("mode", "experts", "count"),
    [
        (CUDAGraphMode.FULL_DECODE_ONLY, False, DRAFTS),
        (CUDAGraphMode.FULL_AND_PIECEWISE, False, DRAFTS),
        # There is no later pass.
        (CUDAGraphMode.FULL_DECODE_ONLY, True, 1),
        # vLLM drafts for the largest size.
        (CUDAGraphMode.FULL_DECODE_ONLY, True, 2),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True, 3),
    ],
)
def test_ranks_run_the_same_passes_in_graphs(vllm_here: Any, mode: CUDAGraphMode, experts: bool, count: int) -> None:
    skip_where_padding_overwrites_keys(vllm_here)
    drafts = Version(vllm_here.version) >= Version("0.30")
    with both(vllm_here, mode, experts, count) as engines:
        load(engines, PLAIN + BEST + MORE)
        for side in engines[1].sides:
            tail, inputs = side.runner.tail_graphs, side.runner.step_inputs
            assert tail._sampling.outcomes()["served"] > 5
            assert inputs._step_counts.outcomes()["served"] > 5
            assert (tail._drafting.outcomes().get("served", 0) > 5) is drafts


def skip_where_vllm_drafts(tree: Any) -> None:
    if Version(tree.version) < Version("0.30"):
        pytest.skip("vLLM drafts")


@pytest.mark.each_vllm("v2-step-inputs")
def test_vllm_drafts_sizes_without_a_graph_from_its_own_inputs(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_vllm_drafts(vllm_here)
    monkeypatch.setattr(tail_capture, "later_tokens", lambda runner, num_reqs, query_len: 0)
    with both(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, experts=True) as engines:
        for engine in engines:
            for side in engine.sides:
                # Without a graph the first pass reads the step's attention metadata.
                side.runner.speculator.prefill_cudagraph_manager._graphs_captured = False
        load(engines, PLAIN)
        assert engines[1].sides[0].runner.tail_graphs._sampling.outcomes()["served"] > 5


@pytest.mark.each_vllm("v2-step-inputs")
@pytest.mark.parametrize("method", ["_draft", "_prepared"])
def test_all_ranks_draft_in_graphs_of_experts_or_none(
    vllm_here: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_where_vllm_drafts(vllm_here)
    votes, works = Votes(), getattr(TailRecorder, method)

    def fails(recorder: Any, of: Any, *args: Any) -> Any:
        made = works(recorder, of, *args)
        if of.num_reqs == 2 and votes.here() == 1 and (method == "_prepared" or Graph.capturing is not None):
            raise RuntimeError("no memory")
        return made

    monkeypatch.setattr(TailRecorder, method, fails)
    with both(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, experts=True, votes=votes) as engines:
        assert all(side.runner.tail_graphs.captured is None for side in engines[1].sides)
        # Each rank has asked as often as the other, or one of them would still wait.
        assert votes.counts[0] == votes.counts[1]
        load(engines, PLAIN)


@pytest.mark.each_vllm("v2-step-inputs")
def test_ranks_that_exchange_other_tokens_are_noticed(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_vllm_drafts(vllm_here)
    monkeypatch.setattr(tail_capture, "later_tokens", lambda runner, num_reqs, query_len: num_reqs)
    with (
        both(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, experts=True) as engines,
        pytest.raises(AssertionError, match="ranks exchange other tokens"),
    ):
        load(engines, PLAIN)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("by_target", [True, False])
def test_a_rank_does_not_draft_in_a_graph_of_experts_where_another_has_a_prompt(
    vllm_here: Any, by_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Version(vllm_here.version) < Version("0.33"):
        pytest.skip("vLLM drafts for all requests that the graph holds")
    # A mixed batch's graphs have as many tokens as those of decode batches.
    monkeypatch.setattr(mixed_graphs, "SIZES", (3, 6))
    if not by_target:
        monkeypatch.setattr(tail_graph, "draft_ranks", lambda runner, left: Beyond.NONE)
    control = nullcontext() if by_target else pytest.raises(AssertionError, match="ranks exchange other tokens")
    with both(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, experts=True) as engines, control:
        for engine in engines:
            engine.sides[0].add("decodes", [1, 2], max_tokens=20, temperature=0.0)
        for number in range(4):
            serve(engines)
            one, other = (side.exchanged() for side in engines[1].sides)
            assert other == one, "ranks exchange other tokens"
            for engine in engines:
                for place in range(MAX_REQS):
                    engine.sides[1].add(f"{number}-{place}", [number + 4 * place], max_tokens=1, temperature=0.0)
        assert engines[1].sides[0].runner.tail_graphs._drafting.outcomes()["no_full_graph"]


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
            passes = engines[1].passes[0]
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
