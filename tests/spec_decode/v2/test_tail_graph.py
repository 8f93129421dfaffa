# SPDX-License-Identifier: Apache-2.0
"""What drafting is given, and when it is left to vLLM. That graphs draft as vLLM is shown on the simulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from torch.utils._pytree import tree_leaves

from vllm_hwplugin.base import run_records
from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.obstacles import Part
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2 import tail_capture, tail_graph
from vllm_hwplugin.spec_decode.v2.recording import SamplerParts
from vllm_hwplugin.spec_decode.v2.step_inputs import StepInputs
from vllm_hwplugin.spec_decode.v2.tail_capture import Captured, Served, ShapeGraphs, TailRecorder
from vllm_hwplugin.spec_decode.v2.tail_graph import TailGraphs
from vllm_hwplugin.spec_decode.weights import FusedWeights, Parameters, Touched, around_graphs

HIDDEN, OTHER = torch.ones(8, 2), torch.ones(8, 4)


def captured(**changed: Any) -> Captured:
    """A capture without graphs, but for what is changed."""
    usual: dict[str, Any] = {one.name: None for one in dataclasses.fields(Captured)}
    usual |= {"left": {}, "graphs": {}, "mixed": {}, "by_rows": (), "adapts_logits": False, "drawn_by_host": False}
    usual |= {"fused": FusedWeights(None), "touched": Touched(), "parameters": Parameters()}
    return Captured(**usual | changed)


def shape_graphs(width: int, size: int, *parts: SamplerParts, graph: Any, outputs: Any = None) -> ShapeGraphs:
    """Graphs that all are `graph`."""
    served = Served(graph, outputs)
    return ShapeGraphs(uniform_shape(width, size), dict.fromkeys(parts, served), served)


def test_fused_weights_that_do_not_fit_leave_the_step_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(run_records, "use", lambda *said: noted.append(said))
    draft = SimpleNamespace(model=SimpleNamespace(fused=torch.ones(2, 3)))
    runner = SimpleNamespace(max_num_reqs=2, sample=lambda *_: "vLLM's", model_state=None)
    graphs = TailGraphs(runner)
    graphs.captured = captured(fused=FusedWeights(draft))
    inputs = graphs.add(StepInputs)
    inputs.captured = object()  # type: ignore[assignment]
    graphs.held = object()  # type: ignore[assignment]
    draft.model.fused = torch.ones(2, 4)
    # Before the step's inputs are made: vLLM's drafter takes attention metadata, which a graph of them leaves out.
    assert inputs.steady(SimpleNamespace(), None) is None
    assert graphs.sample(HIDDEN, SimpleNamespace(num_reqs=1, has_structured_output_reqs=False), None) == "vLLM's"
    assert graphs.held is None
    assert inputs.captured is None
    assert graphs._sampling.outcomes() == {"not_captured": 1}
    reason = "the draft model's fused has another shape or type than at capture"
    assert noted == [("v2-step-inputs", False, reason), ("v2-tail-graph", False, reason)]


@pytest.mark.parametrize("pack", [lambda one: one, lambda one: {"w": one}, lambda one: (one, torch.zeros(1))])
def test_what_a_head_fuses_anew_is_put_where_graphs_read_it(pack: Callable[[torch.Tensor], Any]) -> None:
    """As XPress keeps it in a dictionary, and LiLiCorr in a tuple."""
    draft, head = torch.nn.Module(), torch.nn.Linear(2, 2)
    draft.model = torch.nn.Module()
    draft.model.head = head
    at_capture = torch.ones(2, 3)
    head.fused = pack(at_capture)
    fused = FusedWeights(draft)
    assert fused.keep_in_place() is None
    head.fused = pack(torch.full((2, 3), 2.0))
    assert fused.keep_in_place() is None
    assert at_capture.eq(2).all()
    assert any(leaf is at_capture for leaf in tree_leaves(head.fused))
    head.fused = pack(torch.ones(2, 4))
    assert "fused" in str(fused.keep_in_place())
    head.fused = None
    assert "fused" in str(fused.keep_in_place())


def test_what_vllm_calls_outside_of_its_graphs_is_watched() -> None:
    head, fc = torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    model = SimpleNamespace(lm_head=head, model=SimpleNamespace(fc=fc, fc_norm=None, input_norm=fc))
    assert around_graphs(model) == [(model, "lm_head"), (model.model, "fc"), (model.model, "input_norm")]
    model = SimpleNamespace(language_model=SimpleNamespace(lm_head=head))
    assert around_graphs(model) == [(model.language_model, "lm_head")]
    parameters = Parameters(places=around_graphs(model))
    assert parameters.moved() is None
    model.language_model.lm_head = torch.nn.Linear(2, 3)
    assert "lm_head" in str(parameters.moved())


@pytest.mark.parametrize(("method", "watched"), [("eagle3", False), ("draft_model", True)])
def test_no_graph_of_vllm_reads_a_weight_of_a_draft_model(
    method: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So vLLM would go on with another in its place."""
    draft = torch.nn.Sequential(torch.nn.Linear(2, 2))
    runner = SimpleNamespace(
        max_num_reqs=2,
        decode_query_len=4,
        model=torch.nn.Module(),
        speculator=SimpleNamespace(model=draft),
        sampler=SimpleNamespace(sampling_states=SimpleNamespace(vocab_size=9)),
        speculative_config=SimpleNamespace(method=method),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)),
        lora_config=None,
    )
    monkeypatch.setattr(tail_capture, "TailBuffers", lambda *_: None)
    monkeypatch.setattr(tail_capture, "idx_dtype", lambda _: torch.int32)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    shape = uniform_shape(4, 1)
    monkeypatch.setattr(TailRecorder, "_capture_shape", lambda *_: ShapeGraphs(shape, {}, Reason.NOT_CAPTURED))
    parameters = TailRecorder(runner, runner, {}, [shape]).record().watched(runner).parameters
    draft[0].weight.data = torch.ones(2, 2)
    assert (parameters.moved() is not None) == watched


@pytest.mark.parametrize("left", [Part.V2_SAMPLING, Part.V2_DRAFTING])
def test_a_head_is_watched_by_its_own_graphs_only(left: Part) -> None:
    models = {part: torch.nn.Module() for part in (Part.V2_SAMPLING, Part.V2_DRAFTING)}
    for model in models.values():
        model.lm_head = torch.nn.Linear(2, 3)
    target, draft = models.values()
    runner = SimpleNamespace(model=target, speculator=SimpleNamespace(model=draft))
    parameters = captured(left={left: ""}).watched(runner).parameters
    models.pop(left).lm_head = torch.nn.Linear(2, 3)
    assert parameters.moved() is None
    (read,) = models.values()
    read.lm_head = torch.nn.Linear(2, 3)
    assert "lm_head" in str(parameters.moved())


@pytest.mark.parametrize("name", ["draft_tokens", "drafts"])
def test_drafts_are_where_the_speculator_has_them_and_with_a_grammar_a_copy(name: str) -> None:
    """vLLM copies drafts of a grammar's requests to the host while the next step runs."""
    there = torch.zeros(4, 3)
    speculator = SimpleNamespace(**{name: there})
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=4, decode_query_len=4, speculator=speculator))
    served = Served(SimpleNamespace(replay=lambda: None), None)  # type: ignore[arg-type]
    for grammar in (False, True):
        batch = SimpleNamespace(num_reqs=2, has_structured_output_reqs=grammar)
        graphs._step = tail_graph._Step(batch, served, served)
        assert graphs.propose(lambda *_, **__: None, batch).data_ptr() == there.data_ptr()
        assert (graphs.drafts_of(torch.arange(2)).data_ptr() == there.data_ptr()) is not grammar
    # Where the number changes, vLLM drafts.
    graphs.held = SimpleNamespace(graphs=SimpleNamespace(query_len=4))  # type: ignore[assignment]
    assert graphs.propose(lambda *_, **__: "vLLM's", batch, num_speculative_tokens=1) == "vLLM's"


def test_the_same_requests_are_held_anew_with_another_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graphs read differs, for as many requests."""
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=8, req_states=SimpleNamespace(free_indices=[7])))
    graph, written = SimpleNamespace(), []
    made = {width: shape_graphs(width, 2, graph=graph) for width in (4, 2)}
    capture = captured(graphs={(width, 2): one for width, one in made.items()})
    monkeypatch.setattr(graphs, "_needed", lambda *_: SamplerParts.PLAIN)
    monkeypatch.setattr(graphs, "_write", lambda _, rows, query_len: written.append(query_len))
    for width in (4, 4, 2, 2, 4):
        held = graphs.hold(capture, ["a", "b"], np.array([0, 1]), width, 2 * width)
        assert not isinstance(held, Reason)
        assert held.graphs is made[width]
    assert written == [4, 2, 4]
    # Drafting writes to padding's row.
    graphs._owner.req_states.free_indices = []
    assert graphs.hold(capture, ["c"], np.array([0]), 4, 8) is Reason.NO_FREE_ROW


def test_a_graph_with_far_more_logits_than_a_batch_has_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one in which a request has fewer rows than it needs."""
    runner: Any = SimpleNamespace(max_num_reqs=8)
    graphs = TailGraphs(runner)
    graph: Any = object()
    made = {(width, 2): shape_graphs(width, 2, SamplerParts.PLAIN, graph=graph) for width in (4, 2)}
    capture = captured(graphs=made, most_reqs={4: 2, 2: 2})
    needed: Any = Reason.NO_FREE_ROW
    monkeypatch.setattr(graphs, "_needed", lambda *_: needed)
    batch = SimpleNamespace(
        num_reqs=2,
        num_draft_tokens=3,
        idx_mapping_np=np.array([0, 1]),
        cu_num_logits_np=np.array([0, 4, 5]),
        has_structured_output_reqs=False,
    )
    assert graphs._sampling_alone(capture, HIDDEN, batch, Reason.PROMPT) is needed
    monkeypatch.setattr(tail_graph, "_SURPLUS", 2)
    assert graphs._sampling_alone(capture, HIDDEN, batch, Reason.PROMPT) is Reason.PROMPT
    # With a schedule the smallest that holds its logits is replayed.
    few = SimpleNamespace(**{**vars(batch), "cu_num_logits_np": np.array([0, 2, 3])})
    assert graphs._sampling_alone(capture, HIDDEN, few, Reason.PROMPT) is needed
    monkeypatch.setattr(tail_graph, "_SURPLUS", 3)
    assert graphs._sampling_alone(capture, HIDDEN, batch, Reason.PROMPT) is needed
    del made[4, 2]
    assert graphs._sampling_alone(capture, HIDDEN, batch, Reason.PROMPT) is Reason.LARGER_BATCH


def test_where_the_device_has_the_counts_of_drafts_a_graph_holds_a_batchs_rows() -> None:
    """And two that no request has, if it has padding and drafts."""
    shapes = [GraphShape(*shape, None) for shape in ((6, 6), (8, 6), (16, 6), (24, 6))]
    graphs = [ShapeGraphs(shape, {}, Reason.NOT_CAPTURED) for shape in shapes]

    def found(num_reqs: int, num_rows: int) -> int | None:
        graph = tail_graph._holding(graphs, num_reqs, num_rows)
        return None if graph is None else graph.shape.num_tokens

    assert [found(2, rows) for rows in (3, 6, 7, 8)] == [8, 8, 16, 16]
    assert [found(6, rows) for rows in (7, 8, 9, 24)] == [8, 8, 16, 24]
    assert (found(5, 23), found(7, 8)) == (None, None)
    # Without drafts vLLM has another sampler.
    assert (found(2, 2), found(6, 6), found(7, 7)) == (6, 6, None)
