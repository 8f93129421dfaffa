# SPDX-License-Identifier: Apache-2.0
"""Two stages of a pipeline, stepped as vLLM's workers are: each replays the same graph of a mixed batch.

A stage gets as many hidden states as its own graph holds, so the stage before must have run the same graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from vllm.config.compilation import CUDAGraphMode
from vllm.sequence import IntermediateTensors

from vllm_hwplugin.spec_decode.v2 import mixed_graphs

from .. import streams
from ..engines import HIDDEN, Model
from ..walks import UNPATCHED, Sides, host_of_graphs, live_load
from .released_modules import Graph, ReleasedModules
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin
from .test_data_parallel import RANKS, Votes
from .test_mixed_graphs import SIZES_HERE, Whole, graphs_of

STAGES = RANKS


class FirstModel(Model):
    def forward(self, *args: Any, **given: Any) -> Any:
        return IntermediateTensors({"hidden_states": super().forward(*args, **given)})


class LastModel(Model):
    def forward(self, *, input_ids: Any, positions: Any, intermediate_tensors: Any, **_: Any) -> Any:
        assert input_ids is None
        return super().forward(None, positions, inputs_embeds=intermediate_tensors["hidden_states"])

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> Any:
        return IntermediateTensors({"hidden_states": torch.zeros(batch_size, HIDDEN)})


class Stage(Whole):
    """One stage; only the last has a drafter."""

    def __init__(self, modules: ReleasedModules, number: int, **how: Any) -> None:
        self._number = number
        super().__init__(modules, **how)

    def _begin(self) -> None:
        self.config.parallel_config.pipeline_parallel_size = STAGES
        self.config.max_concurrent_batches = STAGES + self._asynchronous
        if type(self.models[0]) is Model:
            self.models[0] = (FirstModel, LastModel)[self._number]("target", self.context)
            if self._number == 0:
                del self.models[1:]
                del self.config.compilation_config.static_forward_context["draft"]
                self.kv_cache_config.kv_cache_groups[0].layer_names.remove("draft")
        super()._begin()


class Stages:
    """The runner of an engine: calls each stage's as vLLM's workers do."""

    def __init__(self, first: Any, last: Any) -> None:
        self._first, self._last = first, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._last, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_first", "_last"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._last, name, value)

    def execute_model(self, scheduled: Any) -> Any:
        output = self._first.execute_model(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return self._last.execute_model(scheduled)
        sent = {name: tensor.clone() for name, tensor in output.tensors.items()}
        return self._last.execute_model(scheduled, IntermediateTensors(sent))

    def sample_tokens(self, grammar: Any) -> Any:
        output = self._last.sample_tokens(grammar)
        self._first.sample_tokens(grammar)
        return output


class Pipeline(Stage):
    """An engine of two stages.

    Attributes:
        passes: by stage, what its target ran in the last step: a graph or no graph, with its tokens.
        replays: of mixed batches' graphs, in all steps.
    """

    def __init__(self, modules: list[ReleasedModules], votes: Votes, monkeypatch: Any, **how: Any) -> None:
        self.passes: list[list[Any]] = [[] for _ in range(STAGES)]
        self.replays = 0
        last = super().__init__

        def first() -> None:
            self.first = Stage(modules[0], 0, **how)

        votes.start([first, lambda: last(modules[1], 1, **how)], monkeypatch)
        for passes, side in zip(self.passes, (self.first, self), strict=True):
            self._note(side, passes)
        self.runner = Stages(self.first.runner, self.runner)

    def _note(self, side: Side, passes: list[Any]) -> None:
        side.models[0].register_forward_pre_hook(
            lambda _, args, given: passes.append(("no graph", len(given["positions"]))), with_kwargs=True
        )
        manager = side.runner.cudagraph_manager
        replay = manager.run_fullgraph

        def noted(desc: Any) -> Any:
            passes.append(("mixed" if desc.uniform_token_count is None else "decodes", desc.num_tokens, desc.num_reqs))
            return replay(desc)

        manager.run_fullgraph = noted

    def step(self) -> None:
        for passes in self.passes:
            passes.clear()
        super().step()
        assert self.passes[0] == self.passes[1], "stages differ"
        self.replays += sum(name == "mixed" for name, *_ in self.passes[0])

    def state(self) -> Any:
        return [self.first.state(), super().state()]

    def restart(self) -> None:
        if hasattr(self, "first"):
            self.first.restart()
        super().restart()


@contextmanager
def pipelines(tree: Any, mode: CUDAGraphMode, votes: Votes | None = None) -> Iterator[Sides]:
    """Unpatched vLLM, and vLLM with graphs of mixed batches, whose stages ask each other by `votes`."""
    mail: deque[torch.Tensor] = deque()

    def broadcast(tensor: torch.Tensor, src: int, group: int) -> None:
        if group == src:
            mail.append(tensor.clone())
        else:
            sent = mail.popleft()
            assert sent.shape == tensor.shape
            streams.Stream.current.launch(lambda: tensor.copy_(sent))

    def group_of(number: int) -> Any:
        return SimpleNamespace(
            is_first_rank=number == 0,
            is_last_rank=number == STAGES - 1,
            last_rank=STAGES - 1,
            world_size=STAGES,
            make_sibling_device_group=lambda group_desc: number,
        )

    with host_of_graphs() as monkeypatch:
        monkeypatch.setattr(mixed_graphs, "SIZES", (*SIZES_HERE, 40))
        monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
        engines = []
        for choices in (UNPATCHED, {}):
            modules = []
            for number in range(STAGES):
                group = {"get_pp_group": lambda number=number: group_of(number)}
                modules.append(ReleasedModules(tree, STAND_INS | group, **choices))
                vars(modules[-1]("cudagraph_utils"))["has_compiled_submodule"] = lambda model: True
            if choices is not UNPATCHED:
                read_by_the_plugin(modules[-1], monkeypatch)
            engines.append(
                Pipeline(modules, votes or Votes("get_pp_group"), monkeypatch, mode=mode, largest=max(SIZES_HERE))
            )
        yield Sides(*engines)


def sizes_of(engine: Pipeline) -> list[set[int]]:
    """By stage, the tokens of the target's graphs of mixed batches."""
    managers = (side.runner.cudagraph_manager for side in (engine.first, engine))
    return [{desc.num_tokens for desc in one.graphs if desc.uniform_token_count is None} for one in managers]


def skip_without_drafts(tree: Any) -> None:
    if Version(tree.version) < Version("0.30"):
        pytest.skip("the first stage does not get the drafts")


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_stages_replay_the_same_graph_of_a_mixed_batch(vllm_here: Any, mode: CUDAGraphMode) -> None:
    skip_without_drafts(vllm_here)
    with pipelines(vllm_here, mode) as sides:
        stock, patched = sides.both
        assert sizes_of(patched) == STAGES * [{*SIZES_HERE}]
        assert graphs_of(patched)["first pass"] == {*SIZES_HERE}
        live_load(sides)
        assert all(graphs for _, graphs in sides.replays)
        assert stock.replays == 0
        assert patched.replays > 8


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_stages_with_other_graphs_are_noticed(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_drafts(vllm_here)
    offer, votes = mixed_graphs._offer, Votes("get_pp_group")

    def bounded(manager: Any, graphs: list[Any], **settings: Any) -> None:
        graphs = [replace(graph, num_reqs=1) if votes.here() and graph.num_tokens > 5 else graph for graph in graphs]
        offer(manager, graphs, **settings)

    monkeypatch.setattr(mixed_graphs, "_offer", bounded)
    with (
        pipelines(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, votes) as sides,
        pytest.raises(AssertionError, match="stages differ"),
    ):
        live_load(sides)


def other_layers(votes: Votes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_FLASH_2_GRID", 50)
    monkeypatch.setattr(mixed_graphs, "flash_versions", lambda group, config: {2 + votes.here()})


def failing(stage: int, draft: bool) -> Callable[[Votes, pytest.MonkeyPatch], None]:
    def fail(votes: Votes, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Model.forward

        def refusing(model: Any, *args: Any, **given: Any) -> Any:
            mixed = len(given["positions"] if "positions" in given else args[1]) in (24, 16)
            if mixed and Graph.capturing is not None and model._draft is draft and votes.here() == stage:
                raise RuntimeError("no memory")
            return forward(model, *args, **given)

        monkeypatch.setattr(Model, "forward", refusing)

    return fail


TROUBLES = {
    "layers": (other_layers, False),
    "capture of the last": (failing(1, False), False),
    # The target's graphs stay.
    "capture of the draft": (failing(1, True), True),
}


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_all_stages_have_these_graphs_or_none(
    vllm_here: Any, trouble: str, used: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_drafts(vllm_here)
    votes, (prepare, stays) = Votes("get_pp_group"), TROUBLES[trouble]
    prepare(votes, monkeypatch)
    with pipelines(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY, votes) as sides:
        assert used["v2-mixed-graphs"] is stays
        assert sizes_of(sides.both[1]) == STAGES * [{*SIZES_HERE} if stays else set()]
        # Each stage has asked as often as the other, or one of them would still wait.
        assert votes.counts[0] == votes.counts[1] > 0
        live_load(sides)
