# SPDX-License-Identifier: Apache-2.0
"""When a step's inputs are made by a graph. That it makes what vLLM does is shown on the simulated device."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.spec_decode.v2.step_inputs import StepInputs

DRAFTS = 3
WIDTH = 1 + DRAFTS


@dataclass
class Batch:
    """The fields of vLLM's `InputBatch` that differ from step to step."""

    num_reqs_after_padding: int = 4
    num_computed_tokens_np: Any = None
    seq_lens_cpu_upper_bound: Any = None


class Tail:
    """`TailGraphs` after a step of two requests, in graphs of four."""

    query_len = WIDTH

    def __init__(self) -> None:
        self.held: Any = SimpleNamespace(req_ids=["b", "a"], rows=np.array([5, 2]))

    def add(self, companion: Any) -> None:
        """Captures nothing."""

    def held_batch(self) -> Batch:
        return Batch()


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


FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=4 * WIDTH, num_reqs=4, uniform_token_count=WIDTH)


@pytest.fixture
def served() -> tuple[StepInputs, Tail, Graph]:
    """Step inputs after a step that vLLM prepared, and tail graphs served."""
    blocks = SimpleNamespace(gpu=torch.tensor([[3, 4]]))
    runner = SimpleNamespace(
        block_tables=SimpleNamespace(num_blocks=blocks),
        req_states=SimpleNamespace(
            num_computed_tokens_np=np.array([0, 0, 20, 0, 0, 50]),
            req_id_to_index={"a": 2, "b": 5},
            prefill_len=SimpleNamespace(np=np.array([0, 0, 8, 0, 0, 9])),
            num_computed_prefill_tokens=np.array([0, 0, 8, 0, 0, 9]),
        ),
    )
    tail, graph = Tail(), Graph()
    inputs = StepInputs(runner, tail)  # type: ignore[arg-type]
    inputs._graphs = {4: graph}  # type: ignore[dict-item]
    inputs._num_blocks = torch.zeros(1, 2, dtype=torch.int64)
    step(inputs, scheduled())
    inputs._step_counts.reset()
    return inputs, tail, graph


def step(inputs: StepInputs, output: Any, desc: Any = FULL) -> Any:
    """The calls of the patched `execute_model`, in its order."""
    inputs.changes_sampling(output)
    inputs.changes_blocks(output)
    return inputs.steady(output, desc)


def test_the_same_requests_are_served_with_their_lengths(served: tuple[StepInputs, Tail, Graph]) -> None:
    inputs, _, graph = served
    batch = step(inputs, scheduled())
    assert graph.replays == 1
    assert inputs._step_counts.outcomes() == {"served": 1}
    # In the order of the batch, which is not that of the schedule; padding has no length.
    assert batch.num_computed_tokens_np.tolist() == [50, 20]
    assert batch.seq_lens_cpu_upper_bound.tolist() == [50 + WIDTH, 20 + WIDTH, 0, 0]
    assert inputs.prepared(batch)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_scheduled_tokens": {"b": WIDTH, "a": WIDTH}}, "requests_changed"),
        ({"num_scheduled_tokens": {"a": WIDTH, "c": WIDTH}}, "requests_changed"),
        ({"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS}}, "fewer_drafts"),
        (
            {"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1]}, "total_num_scheduled_tokens": 6},
            "fewer_drafts",
        ),
        ({"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1]}}, "fewer_drafts"),
        ({"scheduled_new_reqs": ["a"]}, "requests_changed"),
        ({"has_structured_output_requests": True}, "structured_output"),
        ({"num_spec_tokens_to_schedule": 1}, "fewer_drafts"),
        # All of them end with this step. vLLM then drafts nothing, by the attention metadata that it has made.
        ({"skip_drafts": True}, "fewer_drafts"),
    ],
)
def test_what_is_not_as_before_is_left_to_vllm(
    served: tuple[StepInputs, Tail, Graph], changed: dict[str, Any], reason: str
) -> None:
    inputs, _, graph = served
    assert step(inputs, scheduled(**changed)) is None
    assert graph.replays == 0
    assert inputs._step_counts.outcomes() == {reason: 1}


def test_a_prompt_is_told_from_fewer_drafts(served: tuple[StepInputs, Tail, Graph]) -> None:
    inputs, _, _ = served
    inputs._runner.req_states.num_computed_prefill_tokens[5] = 8
    assert step(inputs, scheduled(scheduled_spec_decode_tokens={"a": [-1] * DRAFTS})) is None
    assert inputs._step_counts.outcomes() == {"prompt": 1}


def test_a_target_without_its_graph_is_left_to_vllm(served: tuple[StepInputs, Tail, Graph]) -> None:
    inputs, _, _ = served
    for desc in (
        BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=8, num_reqs=2),
        BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens=8, num_reqs=None),
        BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=8, num_reqs=4, uniform_token_count=None),
    ):
        assert step(inputs, scheduled(), desc) is None
    assert inputs._step_counts.outcomes() == {"no_full_graph": 3}


def test_a_step_that_tail_graphs_did_not_serve_ends_it(served: tuple[StepInputs, Tail, Graph]) -> None:
    inputs, tail, graph = served
    held, tail.held = tail.held, None
    assert step(inputs, scheduled()) is None
    assert inputs._step_counts.outcomes() == {"step_before": 1}
    tail.held = held
    assert step(inputs, scheduled()) is not None
    assert graph.replays == 1


def test_blocks_are_taken_over_when_a_request_has_new_ones(served: tuple[StepInputs, Tail, Graph]) -> None:
    inputs, _, _ = served
    step(inputs, scheduled())
    assert inputs._num_blocks is not None
    assert inputs._num_blocks.tolist() == [[3, 4]]
    inputs._runner.block_tables.num_blocks.gpu = torch.tensor([[9, 9]])
    step(inputs, scheduled())
    assert inputs._num_blocks.tolist() == [[3, 4]]
    grown = scheduled(scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([7],)]))
    assert inputs.changes_blocks(grown)
    step(inputs, grown)
    assert inputs._num_blocks.tolist() == [[9, 9]]


def test_vllm_takes_everything_over_in_each_step_where_there_are_no_graphs() -> None:
    inputs = StepInputs(SimpleNamespace(), Tail())  # type: ignore[arg-type]
    assert inputs.changes_sampling(scheduled())
    assert inputs.changes_blocks(scheduled())
    assert step(inputs, scheduled()) is None


def test_a_batch_that_vllm_prepared_is_not_taken_for_the_last_one(served: tuple[StepInputs, Tail, Graph]) -> None:
    """A dummy run comes between two steps without a call of `steady`."""
    inputs, _, _ = served
    step(inputs, scheduled())
    assert not inputs.prepared(Batch())
    assert inputs.attention_inputs(Batch()) is None
