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
from vllm.v1.worker.gpu.spec_decode import utils

from vllm_hwplugin.base import run_records
from vllm_hwplugin.spec_decode.decode_batch import uniform_shape
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
    usual |= {"left": {}, "graphs": {}, "mixed": {}, "adapts_logits": False, "drawn_by_host": False}
    usual |= {"fused": FusedWeights(None), "touched": Touched(), "parameters": Parameters()}
    return Captured(**usual | changed)


def shape_graphs(width: int, size: int, *parts: SamplerParts, graph: Any, outputs: Any = None) -> ShapeGraphs:
    """Graphs that all are `graph`."""
    served = Served(graph, outputs, Output())
    return ShapeGraphs(uniform_shape(width, size), dict.fromkeys(parts, served), served)


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(get_mtp_target_hidden_states=lambda: OTHER),
        # A target has states for MTP layers alone, and another drafter, from 0.32 on.
        SimpleNamespace(get_mtp_target_hidden_states=lambda: None),
    ],
)
def test_drafting_starts_from_the_states_that_vllm_gives_a_drafter(model: Any) -> None:
    if not hasattr(utils, "get_drafter_hidden_states"):
        pytest.skip("this vLLM has no function for it")
    assert tail_capture.draft_hidden_states(model, HIDDEN).equal(utils.get_drafter_hidden_states(model, HIDDEN))


def test_fused_weights_that_do_not_fit_leave_the_step_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(run_records, "use", lambda *said: noted.append(said))
    draft = SimpleNamespace(model=SimpleNamespace(fused=torch.ones(2, 3)))
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=2, sample=lambda *_: "vLLM's"))
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


def test_a_head_that_is_put_in_the_place_of_another_leaves_the_step_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(2, 3)
    parameters = Parameters(torch.nn.Sequential(head), None)
    head.weight.data.fill_(1)
    assert parameters.moved() is None
    head.weight.data = torch.ones(3, 2)
    assert "weight" in str(parameters.moved())
    head.weight = torch.nn.Parameter(torch.ones(3, 2))
    assert "weight" in str(parameters.moved())
    monkeypatch.setattr(run_records, "use", lambda *_: None)
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=2, sample=lambda *_: "vLLM's"))
    graphs.captured = captured(parameters=parameters)
    graphs.held = object()  # type: ignore[assignment]
    assert graphs.sample(HIDDEN, SimpleNamespace(num_reqs=1, has_structured_output_reqs=False), None) == "vLLM's"
    assert graphs.held is None


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


class Headed(torch.nn.Module):
    """A model whose head no module is given by its place, as of AliceAI, and of drafters that reduce over ranks."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.lm_head, self.logits_processor, self._by_name = torch.nn.Linear(2, 3), Processor(), by_name

    def compute_logits(self) -> None:
        if self._by_name:
            self.logits_processor(hidden_states=torch.ones(1, 2), lm_head=self.lm_head)
        else:
            self.logits_processor.get_top_tokens(self.lm_head, torch.ones(1, 2))


class Processor(torch.nn.Module):
    def forward(self, lm_head: torch.nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ lm_head.weight.T

    def get_top_tokens(self, lm_head: torch.nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
        return (hidden_states @ lm_head.weight.T).argmax(-1)


@pytest.mark.parametrize("left", [{}, {Part.V2_SAMPLING: ""}, {Part.V2_DRAFTING: ""}])
@pytest.mark.parametrize("of_draft", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_head_is_watched_however_it_is_read_and_by_its_own_graphs_alone(
    left: dict[Part, str], of_draft: bool, whole: bool
) -> None:
    target, draft = Headed(by_name=True), Headed(by_name=False)
    made = captured(left=left)
    with made.touched:
        target.compute_logits()
        draft.compute_logits()
    parameters = made.watched(SimpleNamespace(model=target, speculator=SimpleNamespace(model=draft))).parameters
    assert parameters.moved() is None
    model = draft if of_draft else target
    if whole:
        model.lm_head = torch.nn.Linear(2, 3)
    else:
        model.lm_head.weight = torch.nn.Parameter(torch.ones(3, 2))
    read = (Part.V2_DRAFTING if of_draft else Part.V2_SAMPLING) not in left
    assert (parameters.moved() is not None) is read


@dataclasses.dataclass
class Output:
    """What is replaced of vLLM's `SamplerOutput`."""

    sampled_token_ids: Any = None
    num_sampled: Any = None
    num_rejected: Any = None


def test_each_step_is_counted_and_what_was_in_its_way() -> None:
    """SamplerParts and drafting, in graphs of one request and of three."""
    width, rows = 4, np.zeros(3)
    states = SimpleNamespace(free_indices=[3])
    parameters = {"temperature": rows, "top_k": rows + 9, "top_p": rows + 1}
    runner = SimpleNamespace(
        max_num_reqs=4,
        decode_query_len=width,
        sample=lambda *_: (None, torch.ones(2), torch.ones(2)),
        cudagraph_manager=SimpleNamespace(hidden_states=HIDDEN, use_aux_hidden_state_outputs=False),
        sampler=SimpleNamespace(
            sampling_states=SimpleNamespace(
                vocab_size=9, **{name: SimpleNamespace(np=values) for name, values in parameters.items()}
            )
        ),
        speculator=SimpleNamespace(num_speculative_steps=width - 1, draft_tokens=torch.zeros(4, width - 1)),
        req_states=states,
        main_stream=SimpleNamespace(wait_stream=lambda _: None),
        output_copy_stream=None,
    )
    graphs = TailGraphs(runner)
    graphs._plain[:] = True
    kept = SimpleNamespace(**dict.fromkeys(("sampled_token_ids", "num_sampled", "num_rejected"), torch.zeros(4)))
    written: list[Any] = []
    graph: Any = SimpleNamespace(replay=lambda: None)
    one, three = (shape_graphs(width, size, SamplerParts.PLAIN, graph=graph, outputs=kept) for size in (1, 3))
    graphs.captured = captured(
        graphs={(width, 1): one, (width, 2): three, (width, 3): three},
        most_reqs={width: 3},
        buffers=SimpleNamespace(write=lambda *given: written.append(given)),
    )

    def step(
        count: int,
        *,
        prompts: int = 0,
        short: int = 0,
        grammar: Any = None,
        hidden: Any = HIDDEN,
        wanted: int = width - 1,
        **changed: Any,
    ) -> None:
        """Of `count` requests. The last `prompts` have six tokens of one each, and the first `short` a draft less."""
        drafts = np.array([width - 1] * (count - prompts) + [0] * prompts)
        drafts[:short] -= 1
        tokens = np.array([6 if not some else 1 + some for some in drafts])
        usual = {
            "num_reqs": count,
            "num_tokens": tokens.sum(),
            "num_tokens_after_padding": width if count == 1 else 3 * width,
            "num_draft_tokens": drafts.sum(),
            "num_scheduled_tokens": tokens,
            "has_structured_output_reqs": False,
            "is_prefilling_np": np.arange(count) >= count - prompts,
            "idx_mapping_np": np.arange(count),
            "req_ids": [str(row) for row in range(count)],
            "query_start_loc_np": np.concatenate(([0], tokens.cumsum())),
            "cu_num_logits_np": np.concatenate(([0], (1 + drafts).cumsum())),
            "logits_indices": torch.arange((1 + drafts).sum()),
        }
        batch = SimpleNamespace(**usual | changed)
        graphs.sample(hidden, batch, grammar)
        graphs.propose(lambda *_, **__: None, batch, num_speculative_tokens=wanted)

    step(2)
    step(2)
    step(1, wanted=1)
    assert [len(one[0]) for one in written] == [2, 1]
    # Sampled by a graph, which reads the rows where they are, or copies of them.
    elsewhere = torch.ones(20, 2)
    step(2, prompts=1, hidden=elsewhere)
    step(2, short=1, hidden=elsewhere)
    step(2, short=1)
    step(2, hidden=elsewhere)
    assert [one[3].gathered for one in written[2:]] == [True, True, False, True]
    assert graphs.held is None
    # Without drafts vLLM has another sampler.
    step(2, prompts=2, hidden=elsewhere)
    step(4, hidden=elsewhere)
    step(2, grammar=object())
    step(2, has_structured_output_reqs=True)
    graphs._scores_prompt[1] = True
    step(2, prompts=1, hidden=elsewhere)
    graphs._scores_prompt[1] = False
    states.free_indices = []
    step(2)
    step(2, prompts=1, hidden=elsewhere)
    graphs._plain[1] = False
    step(2)
    step(2, prompts=1, hidden=elsewhere)
    states.free_indices = [3]
    # vLLM samples, and the graph drafts. It copies drafts of a grammar's requests to the host beside the next step.
    step(2)
    assert graphs.drafts_of(torch.arange(2)).data_ptr() == runner.speculator.draft_tokens.data_ptr()
    step(2, has_structured_output_reqs=True)
    assert graphs.drafts_of(torch.arange(2)).data_ptr() != runner.speculator.draft_tokens.data_ptr()
    # The second request has an adapter, which may be one of the head.
    graphs._plain[1] = True
    graphs.captured = dataclasses.replace(graphs.captured, adapts_logits=True)
    runner.lora_state = SimpleNamespace(lora_ids=np.array([0, 7, 0, 0]))
    step(1)
    step(2)
    sampling = {"served": 10, "prompt": 1, "structured_output": 3, "sampling_parameters": 4, "adapters": 1}
    assert graphs._sampling.outcomes() == sampling | {"larger_batch": 1}
    drafting = {"served": 8, "prompt": 5, "fewer_drafts": 3, "no_full_graph": 1}
    assert graphs._drafting.outcomes() == drafting | {"larger_batch": 1, "no_free_row": 2}
    # As the speculator of n-grams has them.
    runner.speculator = SimpleNamespace(num_speculative_steps=width - 1, drafts=torch.zeros(4, width - 1))
    step(2)
    assert graphs.drafts_of(torch.arange(2)).data_ptr() == runner.speculator.drafts.data_ptr()


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
