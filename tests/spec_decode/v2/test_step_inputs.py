# SPDX-License-Identifier: Apache-2.0
"""When a step's inputs are made by a graph. That it makes what vLLM does is shown on the simulated device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2.step_inputs import StepInputs, _Captured

DRAFTS = 3
WIDTH = 1 + DRAFTS


@dataclass
class Batch:
    """The fields of vLLM's `InputBatch` that differ from step to step."""

    num_reqs_after_padding: int = 4
    has_structured_output_reqs: bool = False
    num_computed_tokens_np: Any = None
    seq_lens_cpu_upper_bound: Any = None


class Tail:
    """`TailGraphs` with graphs of four requests, which serve whatever they are asked to hold unless `refuses` says."""

    def __init__(self) -> None:
        self.held: Any = None
        self.refuses: Reason | None = None

    def follow_weights(self) -> None:
        """They stay where they are."""

    def hold(self, _: Any, req_ids: list[str], rows: np.ndarray, query_len: int, num_tokens: int) -> Any:
        assert num_tokens == 4 * query_len
        if self.held is None or self.held.req_ids != req_ids:
            graphs = SimpleNamespace(drafting=object())
            self.held = self.refuses or SimpleNamespace(req_ids=req_ids, rows=rows, graphs=graphs)
        return self.held


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def scheduled(**changed: Any) -> SimpleNamespace:
    """vLLM's `SchedulerOutput` for two requests that decode one token and all their drafts."""
    usual = {
        "num_scheduled_tokens": {"a": WIDTH, "b": WIDTH},
        "total_num_scheduled_tokens": 2 * WIDTH,
        "scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1] * DRAFTS},
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(new_block_ids=[None, None]),
        "has_structured_output_requests": False,
        "num_spec_tokens_to_schedule": DRAFTS,
    }
    return SimpleNamespace(**usual | changed)


def captured(graph: Any, width: int = WIDTH, **changed: Any) -> _Captured:
    """A graph of four requests. What is not told is not so."""
    usual: dict[str, Any] = dict.fromkeys((one.name for one in dataclasses.fields(_Captured)), False)
    base = SimpleNamespace(most_reqs={width: 4}, batch_of=lambda *_: Batch())
    return _Captured(**usual | {"base": base, "graphs": {(width, 4): graph}, "moving": (), "fixed": ()} | changed)


def change(inputs: StepInputs, **changed: Any) -> None:
    assert inputs.captured is not None
    inputs.captured = dataclasses.replace(inputs.captured, **changed)


FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=4 * WIDTH, num_reqs=4, uniform_token_count=WIDTH)


@pytest.fixture
def served() -> tuple[StepInputs, Tail, Graph]:
    """Step inputs after a step that graphs served."""
    blocks = SimpleNamespace(gpu=torch.tensor([[3, 4]]))
    runner = SimpleNamespace(
        speculator=object(),
        block_tables=SimpleNamespace(num_blocks=blocks),
        model_state=SimpleNamespace(),
        req_states=SimpleNamespace(
            num_computed_tokens_np=np.array([0, 30, 20, 0, 0, 50]),
            req_id_to_index={"a": 2, "b": 5, "c": 1},
            prefill_len=SimpleNamespace(np=np.array([0, 7, 8, 0, 0, 9])),
            num_computed_prefill_tokens=np.array([0, 7, 8, 0, 0, 9]),
        ),
    )
    tail, graph = Tail(), Graph()
    inputs = StepInputs(runner, tail)  # type: ignore[arg-type]
    inputs.captured = captured(graph, moving=(blocks,), fixed=(torch.zeros(1, 2, dtype=torch.int64),))
    step(inputs, scheduled())
    inputs._step_counts.reset()
    graph.replays = 0
    return inputs, tail, graph


def step(inputs: StepInputs, output: Any, desc: Any = FULL) -> Any:
    """What `execute_model` has the overrides call, in its order."""
    inputs.begin_step(output)
    return inputs.steady(output, desc)


def applied(inputs: StepInputs) -> list[str]:
    """What vLLM applies of what it has staged, where it is told to."""
    names: list[str] = []
    inputs.apply_sampling(lambda: names.append("sampling"))
    inputs.apply_blocks(lambda: names.append("blocks"))
    return names


def vllms(*_: Any, **__: Any) -> str:
    return "vLLM's"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS}}, "fewer_drafts"),
        (
            {"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1]}, "total_num_scheduled_tokens": 6},
            "fewer_drafts",
        ),
        ({"num_spec_tokens_to_schedule": 1}, "fewer_drafts"),
        # All of them end with this step. vLLM then drafts nothing, by the attention metadata that it has made.
        ({"skip_drafts": True}, "fewer_drafts"),
    ],
)
def test_what_is_no_decode_with_all_drafts_is_left_to_vllm(
    served: tuple[StepInputs, Tail, Graph], changed: dict[str, Any], reason: str
) -> None:
    inputs, _, graph = served
    assert step(inputs, scheduled(**changed)) is None
    assert graph.replays == 0
    assert inputs._step_counts.outcomes() == {reason: 1}


@pytest.mark.parametrize("leaves_parts_out", [True, False])
def test_offsets_of_positions_are_taken_over_after_a_step_with_a_video(
    served: tuple[StepInputs, Tail, Graph], leaves_parts_out: bool
) -> None:
    """vLLM computes them anew in such a step if it leaves out parts, and the step may bring no new blocks."""
    inputs, _, _ = served
    inputs._owner.model_state.mm_pruner = object() if leaves_parts_out else None
    step(inputs, scheduled())
    inputs._owner.req_states.num_computed_prefill_tokens[2] = 7
    fewer = {**vars(scheduled()), "scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS}}
    assert step(inputs, SimpleNamespace(**fewer)) is None
    # When the step's inputs are made.
    inputs._owner.block_tables.num_blocks.gpu = torch.tensor([[5, 6]])
    inputs._owner.req_states.num_computed_prefill_tokens[2] = 8
    step(inputs, scheduled())
    assert inputs.captured.fixed[0].tolist() == ([[5, 6]] if leaves_parts_out else [[3, 4]])


def test_vllm_clears_the_rows_of_block_tables_that_a_graph_wrote(served: tuple[StepInputs, Tail, Graph]) -> None:
    """Up to 0.32 it clears none, and has no count of them."""
    inputs, _, _ = served
    tables = inputs._owner.block_tables
    step(inputs, scheduled())
    assert not hasattr(tables, "_num_dirty_rows")
    for before, after in ((2, 4), (7, 7)):
        tables._num_dirty_rows = before
        step(inputs, scheduled())
        assert tables._num_dirty_rows == after
    assert step(inputs, scheduled(num_spec_tokens_to_schedule=1)) is None
    assert tables._num_dirty_rows == 7


def test_vllm_applies_what_it_has_staged_where_a_step_has_something_new(served: tuple[StepInputs, Tail, Graph]) -> None:
    """And outside of a step, as when it tries the sampler out."""
    inputs, _, _ = served
    inputs.begin_step(scheduled())
    assert applied(inputs) == []
    assert applied(inputs) == ["sampling", "blocks"]
    inputs.begin_step(scheduled(scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([7],)])))
    assert applied(inputs) == ["blocks"]
    inputs.begin_step(scheduled(scheduled_new_reqs=["c"]))
    assert applied(inputs) == ["sampling", "blocks"]


def test_vllm_embeds_where_an_image_is_to_be_encoded(served: tuple[StepInputs, Tail, Graph]) -> None:
    """Or where it has more to do than to embed tokens, of which the graph then makes no embeddings."""
    inputs, _, _ = served
    found = []
    for embeds, images in ((True, {}), (True, {"c": [0]}), (False, {})):
        change(inputs, embeds=embeds)
        batch = step(inputs, scheduled(scheduled_encoder_inputs=images))
        found.append(inputs.prepare_embeddings(vllms, images, batch))
        assert inputs.prepare_embeddings(vllms, images, Batch()) == "vLLM's"
    assert found == [None, "vLLM's", "vLLM's"]


def test_the_sampler_is_told_of_requests_and_processors_that_are_not_vllms_own_of_each_step(
    served: tuple[StepInputs, Tail, Graph],
) -> None:
    inputs, _, _ = served
    inputs.begin_step(scheduled())
    assert applied(inputs) == []
    change(inputs, tells_of_each_step=True)
    inputs.begin_step(scheduled())
    assert applied(inputs) == ["sampling"]
