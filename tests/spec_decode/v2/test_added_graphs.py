# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong while graphs of the plugin are captured, vLLM starts and serves what it serves without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V2_DRAFT_HEAD
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode import capture_sizes, graph_recording, obstacles, ranks
from vllm_hwplugin.spec_decode.v2 import mixed_graphs, step_inputs, tail_capture
from vllm_hwplugin.spec_decode.v2.mixed_sizes import LEFT_OUT

from ...conftest import versions
from ..engines import DRAFTS, Model
from ..graph_manager import Manager
from ..sized_configs import V2, config_of, crossed, fill_of, made, stock
from ..test_mixed_sizes import DRAFTERS
from ..walks import live_load
from .released_modules import Graph
from .test_mixed_graphs import graphs_of, with_them

VERSION, MODE = "0.32.0", CUDAGraphMode.FULL_DECODE_ONLY


class Refused(AssertionError):
    """What a kernel, a builder or a device may raise."""


def when(condition: Callable[..., bool], function: Any) -> Any:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if condition(*args, **kwargs):
            raise Refused("at most 3 tokens of a request\nmore")
        return function(*args, **kwargs)

    return refusing


def capturing(*_: Any, **__: Any) -> bool:
    return Graph.capturing is not None


def longer(_: Any, metadata: Any) -> bool:
    """As MLA builders refuse them, FLASHINFER_MLA's among them."""
    return metadata.max_query_len > 1 + DRAFTS


def mixed(of_draft: bool) -> Callable[..., bool]:
    """A pass of more tokens than one captured decode batch, of which none has 24 or 16."""

    def found(model: Any, input_ids: Any, *_: Any, **__: Any) -> bool:
        return model._draft is of_draft and len(input_ids) in (24, 16) and capturing()

    return found


BUILD = (TritonAttentionMetadataBuilder, "build_for_cudagraph_capture")
#: What raises, and when; the features that are lost.
CAPTURES: dict[str, tuple[tuple[Any, str], Callable[..., bool], set[str]]] = {
    "metadata of mixed graphs": (BUILD, longer, {"v2-mixed-graphs"}),
    "mixed graphs": ((Model, "forward"), mixed(of_draft=False), {"v2-mixed-graphs"}),
    "mixed graphs of the first pass": ((Model, "forward"), mixed(of_draft=True), set()),
    "sampling": ((tail_capture.TailRecorder, "_sample"), capturing, {"v2-tail-graph", "v2-step-inputs"}),
    "drafting": ((tail_capture.TailRecorder, "_draft"), capturing, {"v2-tail-graph", "v2-step-inputs"}),
    # Its third argument is whether the batch is mixed.
    "drafting for prompts": ((tail_capture.TailRecorder, "_draft"), lambda *a: a[3] and capturing(), set()),
    # No graph is captured then.
    "an obstacle": ((obstacles, "get_offloader"), lambda *_: True, {"v2-tail-graph", "v2-step-inputs"}),
    "inputs": ((step_inputs.StepInputs, "_preparing"), lambda *_: True, {"v2-step-inputs"}),
}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_capture_that_raises_costs_its_graphs_and_not_the_start(
    vllm_tree: Any, capture: str, used: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    (owner, name), condition, lost = CAPTURES[capture]
    caplog.set_level(logging.INFO, "vllm.hwplugin")
    patch = mock.patch.object(owner, name, when(condition, getattr(owner, name)))
    patch.start()
    try:
        with with_them(vllm_tree(VERSION), MODE, gate="auto") as sides:
            patch.stop()
            # The engines here share no head.
            assert {feature for feature, serves in used.items() if not serves} - {V2_DRAFT_HEAD} == lost
            # What needs the graphs that failed says so in a line of its own.
            (said,) = [one for one in caplog.records if "at most 3 tokens of a request" in one.getMessage()]
            assert said.levelno == (logging.INFO if capture == "an obstacle" else logging.WARNING)
            found = graphs_of(sides.both[1])
            assert bool(found["target"]) == ("v2-mixed-graphs" not in lost)
            assert bool(found["first pass"]) == ("mixed" not in capture)
            if "v2-mixed-graphs" in lost:
                stock, patched = (side.runner.cudagraph_manager for side in sides.both)
                assert list(map(str, patched.graphs)) == list(map(str, stock.graphs))
                assert patched.hidden_states.shape == stock.hidden_states.shape
            live_load(sides)
    finally:
        mock.patch.stopall()
    if "v2-tail-graph" not in lost:
        tail = sides.both[1].runner.tail_graphs
        assert tail._sampling.outcomes()["served"] > 5
        assert tail._drafting.outcomes()["served"] > 5
        assert bool(tail.captured.mixed) == (capture == "inputs")


class Failing(Manager):
    """Passes of more tokens than vLLM's own sizes fail."""

    def _run(self, owner: object, num_tokens: int, mode: CUDAGraphMode) -> None:
        super()._run(owner, num_tokens, mode)
        if num_tokens > 512:
            raise Refused


@pytest.mark.parametrize("profile", [False, True])
def test_a_drafters_graphs_have_one_stream(
    entry: run_records.RunRecord, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch, *, profile: bool
) -> None:
    """So later ones use the memory of earlier ones; the target's are on another, also for vLLM's estimate."""
    tree = vllm_tree(SUPPORTED[-1])
    config = made(config_of(3, 64, v2=True), fill_of(tree))
    manager = Manager(tree, config, monkeypatch, profile=profile)
    before = torch.cuda.current_stream()
    assert len(manager.memory.pools) == 1
    for mode in DRAFTERS:
        assert manager.capture_drafter(mode).graphs
    assert len(manager.memory.pools) == 2
    assert torch.cuda.current_stream() is before


@pytest.mark.parametrize(
    ("version", "how"),
    crossed(versions(*V2, among=SUPPORTED[SUPPORTED.index("0.29.0") :]), [(mixed_graphs.SIZES, True), ((), False)]),
)
def test_released_managers_capture_what_they_do_without_the_plugin(
    vllm_tree: Any,
    version: str,
    how: tuple[tuple[int, ...], bool],
    entry: run_records.RunRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, (full, profile) = vllm_tree(version), how
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: None)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    # Timing would take back what fails.
    monkeypatch.setenv("VLLM_HWPLUGIN_CAPTURE_SIZES", "decode")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def planned(manager: Any) -> dict[str, list[str]]:
        return {mode.name: list(map(str, descs)) for mode, descs in manager._capture_descs.items()}

    plain = config_of(v2=True)
    stock(plain)
    expected = Manager(tree, plain, monkeypatch, profile=profile)
    config = made(config_of(v2=True), fill_of(tree))
    vars(config.compilation_config)["_hwplugin_mixed_graphs"] = bool(full)
    found = Failing(tree, config, monkeypatch, full, profile=profile)
    assert planned(found.made) == planned(expected.made)
    assert list(map(str, found.made.graphs)) == list(map(str, expected.made.graphs))
    assert found.made._max_full_descs_to_capture == 2 if profile else True
    assert not profile or len(found.made._capture_mem_samples) == 2
    assert config.compilation_config.cudagraph_capture_sizes == plain.compilation_config.cudagraph_capture_sizes
    assert LEFT_OUT not in vars(config.compilation_config)
    assert capture_sizes.largest_own(config.compilation_config) is None
    for mode in DRAFTERS:
        drafters = [one.capture_drafter(mode) for one in (expected, found)]
        assert planned(drafters[1]) == planned(drafters[0])


def test_ranks_of_data_parallelism_agree_on_larger_sizes_alone(
    vllm_tree: Any, entry: run_records.RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.32 they have larger sizes, and no graphs of mixed batches."""
    asked: list[ranks.Beyond] = []

    def all_ranks(well: bool, beyond: ranks.Beyond = ranks.Beyond.NONE) -> bool:
        asked.append(beyond)
        return well

    monkeypatch.setattr(graph_recording, "all_ranks", all_ranks)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    tree = vllm_tree(VERSION)
    Manager(tree, made(config_of(v2=True, dp=2, experts=True), fill_of(tree)), monkeypatch)
    assert asked
    assert all(ranks.Beyond.DATA_PARALLEL in beyond for beyond in asked)


def test_a_rank_goes_on_without_graphs_that_failed_on_another(
    vllm_tree: Any, used: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices before its next graph, and asks no more often than the rank on which one failed."""
    asked: list[bool] = []

    def all_ranks(well: bool, beyond: Any = None) -> bool:
        asked.append(well)
        return len(asked) != 4

    monkeypatch.setattr(graph_recording, "all_ranks", all_ranks)
    with with_them(vllm_tree(VERSION), MODE, gate="auto") as sides:
        assert not used["v2-mixed-graphs"]
        assert not graphs_of(sides.both[1])["target"]
        assert all(asked)
        live_load(sides)


def test_nor_where_they_failed_on_a_rank_of_data_parallelism(
    vllm_tree: Any, used: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pads its batches to other graphs then, and all ranks must pad alike."""
    asked = 0

    def over(group: Any, value: int, op: Any) -> int:
        nonlocal asked
        asked += group == "data"
        return value and asked != 4

    monkeypatch.setattr(ranks, "_over", over)
    monkeypatch.setattr(ranks, "get_dp_group", lambda: "data")
    monkeypatch.setattr(ranks, "get_pp_group", lambda: "stages")
    monkeypatch.setattr(ranks, "model_parallel_is_initialized", lambda: True)
    for module in (ranks, graph_recording):
        monkeypatch.setattr(module, "tensor_parallel", lambda: False)
    with with_them(vllm_tree(VERSION), MODE, gate="auto") as sides:
        # Nothing of sampling, drafting and inputs is agreed.
        assert asked == 4
        assert not used["v2-mixed-graphs"]
        assert not graphs_of(sides.both[1])["target"]
        assert sides.both[1].runner.tail_graphs.captured
