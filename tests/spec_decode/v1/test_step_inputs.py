# SPDX-License-Identifier: Apache-2.0
"""Which steps a graph prepares. That it leaves what vLLM does is shown on the simulated device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.utils import CpuGpuBuffer

from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.spec_decode.graph_recording import RecordingFailed
from vllm_hwplugin.spec_decode.v1 import step_inputs
from vllm_hwplugin.spec_decode.v1.step_inputs import StepInputs

FIELDS = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
DRAFTS = 3
WIDTH = 1 + DRAFTS
#: Two requests, by their tokens that are computed before the first step.
COMPUTED = {"b": 50, "a": 20}


class Graph:
    """What was recorded, run again without vLLM's methods being called for it."""

    def __init__(self, run: Callable[[], None], runner: Runner) -> None:
        self.run, self.runner, self.replays = run, runner, 0
        run()

    def replay(self) -> None:
        self.replays += 1
        built = self.runner.built
        self.run()
        self.runner.built = built


class Runner:
    """What `StepInputs` reads of a V1 runner, whose requests have all drafts accepted in each step."""

    uniform_decode_query_len = WIDTH
    device = torch.device("cpu")
    max_num_reqs, max_num_tokens, max_model_len = 2, 2 * WIDTH, 1000

    def __init__(self, asynchronous: bool, derives: bool) -> None:
        self.use_async_spec_decode = asynchronous
        self.vllm_config = None
        self.derives = derives
        self.prepared, self.committed, self.built = 0, 0, 0
        count = len(COMPUTED)
        index = {name: row for row, name in enumerate(COMPUTED)}
        computed = torch.tensor(list(COMPUTED.values()), dtype=torch.int32)
        table = torch.arange(count * 100, dtype=torch.int32).view(count, 100)
        self.input_batch = SimpleNamespace(
            req_ids=list(COMPUTED),
            num_reqs=count,
            req_id_to_index=index,
            prev_req_id_to_index=dict(index),
            prev_sampled_token_ids=torch.tensor([[7], [8]], dtype=torch.int32),
            num_computed_tokens_cpu_tensor=computed,
            num_computed_tokens_cpu=computed.numpy(),
            num_prompt_tokens=np.array([30, 10]),
            token_ids_cpu=table.numpy(),
            block_table=SimpleNamespace(commit_block_table=self._commit, compute_slot_mapping=lambda *_: None),
        )
        self.query_start_loc = self._make_buffer(count + 1, dtype=torch.int32)
        self.num_accepted_tokens = self._make_buffer(count, dtype=torch.int32)
        self.input_ids = self._make_buffer(2 * WIDTH, dtype=torch.int32)
        self.positions, self.seq_lens = torch.zeros(2 * WIDTH, dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
        self.num_computed_tokens = computed.clone()
        self.valid_sampled_token_count_gpu: Any = torch.tensor([4, 2], dtype=torch.int32)
        self._draft_token_ids: Any = torch.tensor([[1, 2, 3], [4, 5, 6]])
        self.prev_num_draft_tokens = SimpleNamespace(np=np.full(count, DRAFTS, dtype=np.int32))
        self.num_decode_draft_tokens = SimpleNamespace(np=np.full(count, DRAFTS, dtype=np.int32))
        self.discard_request_mask = SimpleNamespace(np=np.zeros(count, dtype=bool))
        self.optimistic_seq_lens_cpu = torch.zeros(count, dtype=torch.int32)
        self.requests = {name: SimpleNamespace(num_tokens=known + 1) for name, known in COMPUTED.items()}

    def _make_buffer(self, *size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(*size, dtype=dtype, device=self.device, pin_memory=False)

    def _determine_batch_execution_and_padding(self, **asked: Any) -> tuple[CUDAGraphMode, BatchDescriptor]:
        return CUDAGraphMode.FULL, BatchDescriptor(asked["num_tokens"], asked["num_reqs"])

    def _commit(self, num_reqs: int) -> None:
        self.committed += 1

    def _update_states(self, scheduled: Any) -> None:
        for row, name in enumerate(self.input_batch.req_ids):
            if name in scheduled.num_scheduled_tokens:
                self.input_batch.num_computed_tokens_cpu[row] += WIDTH

    def _prepare_inputs(self, scheduled: Any, num_scheduled_tokens: np.ndarray) -> tuple[Any, Any, int]:
        self.prepared += 1
        np.cumsum(num_scheduled_tokens, out=self.query_start_loc.np[1:])
        self.query_start_loc.copy_to_gpu()
        empty = torch.zeros(0, dtype=torch.int32)
        return empty, SpecDecodeMetadata(empty, [DRAFTS] * 2, *[empty] * 5), WIDTH

    def _get_slot_mappings(self, **asked: Any) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        return {0: torch.zeros(8)}, {}

    def _build_attention_metadata(self, **asked: Any) -> tuple[dict[str, Any], CommonAttentionMetadata]:
        self.built += 1
        rows = torch.zeros(3, dtype=torch.int32)
        longest = int(self.optimistic_seq_lens_cpu.max())
        starts = self.query_start_loc
        common = CommonAttentionMetadata(starts.gpu, starts.cpu, rows[:2], 2, 8, WIDTH, longest, rows, rows)
        if "is_prefilling" in FIELDS:
            common.is_prefilling = torch.tensor([False, self.prepared == 1])
        if self.derives:
            # As some builders do.
            common.compute_num_computed_tokens()
        return {"layer": SimpleNamespace(max_seq_len=longest)}, common


class Served:
    """Step inputs and their runner, after a step that vLLM has prepared."""

    def __init__(self, asynchronous: bool, derives: bool = False) -> None:
        self.runner = Runner(asynchronous, derives)
        self.inputs = StepInputs(self.runner)
        with mock.patch.object(step_inputs, "record_graph", lambda run, *_: Graph(run, self.runner)):
            self.inputs.capture()
        self.graph: Any = self.inputs.captured[2].graph if self.inputs.captured else None
        self.runner.built = 0
        self.step()
        self.inputs._step_counts.reset()

    @torch.inference_mode()
    def step(self, asked: Mapping[str, Any] = MappingProxyType({}), **changed: Any) -> tuple[Any, Any]:
        """The calls of the patched `execute_model`, in its order; `asked` is what metadata are asked for otherwise."""
        output = scheduled(**changed)
        self.inputs.update_states(output)
        counts = [output.num_scheduled_tokens[name] for name in self.runner.input_batch.req_ids]
        made = self.inputs.prepare_inputs(output, np.array(counts, dtype=np.int32))
        slots, _ = self.inputs.get_slot_mappings(num_tokens_padded=8, ubatch_slices=None)
        usual = {"num_tokens": 8, "num_tokens_padded": 8, "num_reqs": 2, "num_reqs_padded": 2, "max_query_len": WIDTH}
        usual |= {"ubatch_slices": None, "cascade_attn_prefix_lens": None, "slot_mappings": slots}
        return made, self.inputs.build_attention_metadata(**{**usual, **asked})


def scheduled(**changed: Any) -> SimpleNamespace:
    """vLLM's `SchedulerOutput` for two requests that decode one token and all their drafts."""
    usual = {
        "num_scheduled_tokens": {"a": WIDTH, "b": WIDTH},
        "total_num_scheduled_tokens": 2 * WIDTH,
        "scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1] * DRAFTS},
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(new_block_ids=[None, None], resumed_req_ids=set()),
    }
    return SimpleNamespace(**usual | changed)


@pytest.fixture(autouse=True)
def host_without_a_gpu(monkeypatch: pytest.MonkeyPatch, notes: Any) -> None:
    monkeypatch.setattr(step_inputs, "why_not", lambda *_: None)
    monkeypatch.setattr(step_inputs, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def served(asynchronous: bool) -> Served:
    return Served(asynchronous)


def test_the_same_requests_are_prepared_from_what_they_were(served: Served) -> None:
    first, _ = served.step()
    (_, drafts, widest), (metadata, common) = served.step()
    assert (served.graph.replays, served.runner.prepared, served.runner.built) == (2, 1, 1)
    assert served.inputs._step_counts.outcomes() == {"served": 2}
    assert first[1] is drafts
    assert drafts.num_draft_tokens == [DRAFTS] * 2
    assert widest == WIDTH
    # Three steps further.
    assert served.runner.optimistic_seq_lens_cpu.tolist() == [50 + 4 * WIDTH, 20 + 4 * WIDTH]
    assert common.max_seq_len == metadata["layer"].max_seq_len == 50 + 4 * WIDTH


def test_the_drafter_may_change_what_it_is_given(served: Served) -> None:
    _, (_, common) = served.step()
    common.max_query_len, common.seq_lens = 1, None
    _, (_, again) = served.step()
    assert (again.max_query_len, again.seq_lens is None) == (WIDTH, False)


def test_what_was_derived_from_former_lengths_is_derived_anew(asynchronous: bool) -> None:
    served = Served(asynchronous, derives=True)
    _, (_, common) = served.step()
    assert common._num_computed_tokens_cache is None


def test_what_graphs_read_is_handed_over(served: Served) -> None:
    served.step()
    if served.runner.use_async_spec_decode:
        inputs = served.inputs
        assert inputs._counts.tolist() == [4, 2]
        assert inputs._sampled.tolist() == [7, 8]
        assert inputs._drafts.tolist() == [[1, 2, 3], [4, 5, 6]]
        return
    # Two steps further; each row of the tokens counts from a multiple of 100 on.
    computed, ids = [50 + 2 * WIDTH, 20 + 2 * WIDTH], served.inputs._from_host.np.tolist()
    assert ids[:2] == computed
    assert ids[2:] == [row * 100 + known + i for row, known in enumerate(computed) for i in range(WIDTH)]


def test_padding_of_the_targets_graph_has_no_length(served: Served) -> None:
    """Drafting leaves lengths there, which are its own."""
    served.runner.seq_lens = torch.full((4,), 9, dtype=torch.int32)
    served.step()
    assert served.graph.replays == 1
    assert served.runner.seq_lens.tolist()[2:] == [0, 0]


def test_new_blocks_are_copied(served: Served) -> None:
    served.step()
    served.step(scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([9],)], resumed_req_ids=set()))
    assert (served.graph.replays, served.runner.committed) == (2, 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_tokens_padded": 12},
        {"num_reqs_padded": 3},
        {"ubatch_slices": [slice(0, 1), slice(1, 2)]},
        {"cascade_attn_prefix_lens": [[16]]},
        {"slot_mappings": {0: torch.zeros(8)}},
    ],
)
def test_metadata_that_are_asked_for_otherwise_are_made_anew_and_so_are_the_next(
    served: Served, asked: dict[str, Any]
) -> None:
    served.step(asked)
    assert (served.graph.replays, served.runner.built) == (1, 2)
    served.step()
    assert (served.graph.replays, served.runner.built) == (2, 3)
    served.step()
    assert (served.graph.replays, served.runner.built) == (3, 3)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS}}, "fewer_drafts"),
        ({"scheduled_spec_decode_tokens": {"a": [-1] * DRAFTS, "b": [-1]}}, "fewer_drafts"),
        ({"num_scheduled_tokens": {"a": WIDTH, "b": 2}, "total_num_scheduled_tokens": WIDTH + 2}, "fewer_drafts"),
        ({"num_scheduled_tokens": {"a": WIDTH - 1, "b": WIDTH + 1}}, "fewer_drafts"),
        ({"scheduled_new_reqs": ["a"]}, "requests_changed"),
        (
            {"scheduled_cached_reqs": SimpleNamespace(new_block_ids=[None, None], resumed_req_ids={"a"})},
            "requests_changed",
        ),
    ],
)
def test_what_is_not_as_before_is_left_to_vllm(served: Served, changed: dict[str, Any], reason: str) -> None:
    served.step(**changed)
    assert (served.graph.replays, served.runner.prepared) == (0, 2)
    assert served.inputs._step_counts.outcomes() == {reason: 1}


def test_a_prompt_is_told_from_fewer_drafts(served: Served) -> None:
    served.runner.input_batch.num_prompt_tokens[1] = 100
    served.step(scheduled_spec_decode_tokens={"b": [-1] * DRAFTS})
    assert served.inputs._step_counts.outcomes() == {"prompt": 1}


def other_order(runner: Runner) -> None:
    runner.input_batch.req_ids.reverse()


def discarded(runner: Runner) -> None:
    runner.requests["a"].num_tokens = 90


def no_counts(runner: Runner) -> None:
    runner.valid_sampled_token_count_gpu = None


def fewer_counts(runner: Runner) -> None:
    runner.valid_sampled_token_count_gpu = torch.tensor([4])


def drafts_on_the_host(runner: Runner) -> None:
    runner._draft_token_ids = [[1, 2, 3], [4, 5, 6]]


def fewer_drafts(runner: Runner) -> None:
    runner._draft_token_ids = torch.zeros(2, 2)


def moved(runner: Runner) -> None:
    runner.input_batch.prev_req_id_to_index = {"a": 0, "b": 1}


def was_away(runner: Runner) -> None:
    runner.prev_num_draft_tokens.np[1] = 0


@pytest.mark.parametrize(("change", "reason"), [(other_order, "requests_changed"), (discarded, "prompt")])
def test_another_batch_is_left_to_vllm(served: Served, change: Callable[[Runner], None], reason: str) -> None:
    change(served.runner)
    served.step()
    assert (served.graph.replays, served.runner.prepared) == (0, 2)
    assert served.inputs._step_counts.outcomes() == {reason: 1}


@pytest.mark.parametrize("change", [no_counts, fewer_counts, drafts_on_the_host, fewer_drafts, moved, was_away])
def test_without_the_last_steps_results_vllm_prepares(change: Callable[[Runner], None]) -> None:
    served = Served(asynchronous=True)
    change(served.runner)
    served.step()
    assert (served.graph.replays, served.runner.prepared) == (0, 2)
    assert served.inputs._step_counts.outcomes() == {"step_before": 1}


def test_an_empty_step_empties_the_batch(served: Served) -> None:
    served.inputs.update_states(scheduled(num_scheduled_tokens={}, total_num_scheduled_tokens=0))
    served.step()
    assert (served.graph.replays, served.runner.prepared) == (0, 2)


@pytest.mark.parametrize(("found", "value"), [("discard_request_mask", True), ("num_decode_draft_tokens", 0)])
def test_a_batch_that_is_not_all_decoded_is_not_kept(served: Served, found: str, value: Any) -> None:
    """Some of its tokens are thrown away, or not all of its drafts are verified."""
    getattr(served.runner, found).np[1] = value
    served.step(scheduled_new_reqs=["a"])
    served.step()
    assert (served.graph.replays, served.runner.prepared) == (0, 3)


def test_a_drafter_may_write_its_own_starts_of_requests_where_the_runners_are(served: Served) -> None:
    """vllm-musa's does, and the stock `_prepare_inputs` makes them anew in each step."""
    starts = served.runner.query_start_loc
    for buffer in (starts.gpu, starts.cpu):
        buffer.copy_(torch.arange(3))
    served.step()
    assert served.graph.replays == 1
    assert starts.gpu.tolist() == starts.np.tolist() == [0, WIDTH, 2 * WIDTH]


@pytest.mark.skipif("is_prefilling" not in FIELDS, reason="this vLLM does not say it")
def test_a_prompt_that_ends_in_the_first_step_has_ended_in_the_next(served: Served) -> None:
    """A new request whose prompt is computed but for its last token may have placeholders for drafts."""
    _, (_, common) = served.step()
    assert common.is_prefilling.tolist() == [False, False]


@pytest.mark.parametrize("required", [False, True], ids=["auto", "on"])
def test_a_graph_that_cannot_be_recorded_leaves_every_step_to_vllm(
    monkeypatch: pytest.MonkeyPatch, uses: dict[str, tuple[bool, str]], required: bool
) -> None:
    made: list[Graph] = []
    graph_of = Graph

    def second_fails(run: Callable[[], None], runner: Runner) -> Graph:
        if made:
            raise RecordingFailed("OutOfMemoryError: tried to allocate 1.00 GiB")
        made.append(graph_of(run, runner))
        return made[0]

    monkeypatch.setattr(sys.modules[__name__], "Graph", second_fails)
    if required:
        monkeypatch.setenv("VLLM_HWPLUGIN_V1_STEP_INPUTS", "on")
        with pytest.raises(FeatureRequired, match="OutOfMemoryError"):
            Served(asynchronous=True)
        return
    served = Served(asynchronous=True)
    assert served.runner.num_computed_tokens.tolist() == [50, 20]
    served.step()
    served.step()
    assert served.runner.prepared == 3
    assert made[0].replays == 0
    assert uses["v1-step-inputs"] == (False, "capturing graphs failed: OutOfMemoryError: tried to allocate 1.00 GiB")


def test_recording_leaves_requests_that_are_under_way_as_they_were() -> None:
    """vLLM captures anew where ranks of data parallelism come or go; how far their requests are is on the device."""
    served = Served(asynchronous=True)
    served.runner.num_computed_tokens.copy_(torch.tensor([50, 20]))
    with mock.patch.object(step_inputs, "record_graph", lambda run, *_: Graph(run, served.runner)):
        served.inputs.capture()
    assert set(served.inputs.captured) == {1, 2}
    assert served.runner.num_computed_tokens.tolist() == [50, 20]
