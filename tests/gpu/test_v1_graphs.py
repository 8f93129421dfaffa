# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, more graphs on Model Runner V1 change no token and no draft, under a load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..musa_sim import loads
from ..musa_sim.loads import Load
from .engines import needs
from .mixed_load import CASES, METHODS, compare, options, run_each, serve_256

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Beside the drafters' own graphs, which both sides have.
GRAPHS = ("v1-step-inputs", "v1-draft-phase")


@pytest.mark.parametrize(("method", "mode", "sleeps"), CASES)
def test_more_graphs_change_nothing(method: str, mode: str, sleeps: bool, tmp_path: Path) -> None:
    made = {**options(method, mode), "async_scheduling": True, "enable_sleep_mode": sleeps}
    load = [*loads.mixed(), *loads.two_alone()]
    assert compare(Load(made, load, sleeps), tmp_path, "V1", GRAPHS).preempted


def test_graphs_serve_256_concurrent_requests(tmp_path: Path) -> None:
    features = [*GRAPHS, "draft-full-graph", "draft-loop-graph"]
    paths = ("v1-draft-phase sampling", "v1-draft-phase drafting", "v1-step-inputs inputs")
    drafting = serve_256(tmp_path, "V1", features, paths, async_scheduling=True).counted["v1-draft-phase drafting"]
    assert drafting["served"] > 0.9 * (sum(drafting.values()) - drafting["prompt"])


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_the_scheduler_waits_for_each_step(method: str, tmp_path: Path) -> None:
    made = {**options(method, "FULL_AND_PIECEWISE"), "async_scheduling": False}
    compare(Load(made, loads.mixed()), tmp_path, "V1", GRAPHS)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_nor_where_requests_are_filtered_as_the_model_asks(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A graph would repeat FlashInfer's random numbers.
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    filters = {"top_k": 20, "top_p": 0.9}
    made = {**options("eagle3", "FULL_AND_PIECEWISE"), "async_scheduling": asynchronous}
    load = Load({**made, "override_generation_config": filters}, [*loads.mixed(), *loads.two_alone(**filters)])
    runs = run_each(load, tmp_path, "V1", {"off": {}, "on": dict.fromkeys(GRAPHS, "on")}, GRAPHS)
    loads.assert_same(runs["off"], runs["on"])
    sampling = runs["on"].counted["v1-draft-phase sampling"]
    # Those that ask for log probabilities are few.
    assert sampling["served"] > 4 * sampling.get("sampling_parameters", 0)


@pytest.mark.parametrize("method", METHODS)
def test_nor_do_full_graphs_of_mixed_batches(method: str, tmp_path: Path) -> None:
    """With PIECEWISE graphs of the same sizes, so that both sides round alike."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    made = {**options(method, "FULL_AND_PIECEWISE"), "async_scheduling": True}
    sizes = made["compilation_config"]["cudagraph_capture_sizes"]
    made["compilation_config"]["cudagraph_capture_sizes"] = sorted({*sizes, 32, 64, 96})
    compare(Load(made, [*loads.mixed(), *loads.two_alone()]), tmp_path, "V1", ["v1-mixed-graphs"])


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_drafts_are_drawn_by_temperature(method: str, tmp_path: Path) -> None:
    needs("0.21")
    made = {**options(method, "FULL_AND_PIECEWISE"), "async_scheduling": True}
    made["speculative_config"]["draft_sample_method"] = "probabilistic"
    compare(Load(made, loads.by_temperature()), tmp_path, "V1", GRAPHS)
