# SPDX-License-Identifier: Apache-2.0
"""Which live features a worker uses: the rules, what outweighs them, and where vLLM's released workers ask for them."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from packaging.version import Version
from vllm.config import CUDAGraphMode

from vllm_hwplugin import journal, journals
from vllm_hwplugin.fallback import FeatureRequired, stays_stock
from vllm_hwplugin.journal import Use
from vllm_hwplugin.patching import Catalogue, load_catalogue, make_plan
from vllm_hwplugin.spec_decode import dflash_context_norm, worker_use
from vllm_hwplugin.spec_decode.step_counts import StepCounts
from vllm_hwplugin.spec_decode.v1.draft_decision import DrafterFacts
from vllm_hwplugin.spec_decode.worker_use import V1, V2, WorkerFacts

from ..conftest import versions
from . import drafters

LIVE = (
    *("draft-full-graph", "draft-loop-graph", "dflash-full-graph", "v1-draft-phase"),
    *("dflash-draft-backend", "dflash-context-norm"),
)

FULL = DrafterFacts("EagleProposer", "FULL")
NONE = DrafterFacts("EagleProposer", "NONE", target_has_graphs=False)
NEWEST = Version("0.33.0")
EAGLE = WorkerFacts(NEWEST, V1, "eagle3", 3, drafter="EagleProposer", proposer=FULL)
DFLASH = WorkerFacts(NEWEST, V1, "dflash", 7, drafter="DFlashProposer", proposer=FULL)


@pytest.fixture(autouse=True)
def own_record(tmp_path: Path) -> Iterator[None]:
    """A process in which all features are live."""
    journal.forget()
    entry = journal.new("1")
    entry.vllm_version = "0.32.0+cpu"
    entry.features = {name: {"state": "live", "reason": ""} for name in LIVE}
    journal.begin(entry, tmp_path)
    yield
    journal.forget()


@pytest.mark.parametrize(
    ("facts", "used"),
    [
        (EAGLE, {"draft-full-graph", "draft-loop-graph", "v1-draft-phase"}),
        (dataclasses.replace(EAGLE, decode_graphs=False), {"draft-full-graph", "draft-loop-graph"}),
        (dataclasses.replace(EAGLE, runner=V2, proposer=None), set()),
        (dataclasses.replace(EAGLE, proposer=NONE), set()),
        (dataclasses.replace(EAGLE, proposer=dataclasses.replace(FULL, lora=True)), set()),
        (dataclasses.replace(EAGLE, drafts_here=False, proposer=None), set()),
        (WorkerFacts(NEWEST, V1), set()),
        (WorkerFacts(NEWEST, V1, "ngram", 3, drafter="NgramProposer"), set()),
        # That one pass has no chain of steps, draft-loop-graph says by itself.
        (DFLASH, {*LIVE} - {"dflash-draft-backend"}),
        (dataclasses.replace(DFLASH, runner=V2, proposer=None), {"dflash-context-norm"}),
        (dataclasses.replace(DFLASH, proposer=NONE, context_norm="the op is right"), set()),
        (dataclasses.replace(DFLASH, proposer=NONE, mm_prefix=True), {"dflash-draft-backend", "dflash-context-norm"}),
    ],
)
def test_what_takes_part_follows_from_runner_method_and_mode(facts: WorkerFacts, used: set[str]) -> None:
    uses = worker_use.uses_of(facts, LIVE)
    assert {name for name, use in uses.items() if use["used"]} == used
    # Every other one says why, and a feature that is not live is not spoken of.
    assert all(bool(use["reason"]) is not use["used"] for use in uses.values())
    assert worker_use.uses_of(facts, LIVE[:1]).keys() == {LIVE[0]}


@pytest.mark.parametrize(
    ("version", "runner", "changes", "used"),
    [
        ("0.20.2", V1, {}, True),
        ("0.22.1", V1, {}, False),
        ("0.23.0", V1, {"mm_prefix": True}, True),
        ("0.24.0", V1, {"named_backend": True}, False),
        ("0.24.0", V2, {"named_backend": True}, True),
        ("0.24.0", V2, {}, False),
        ("0.28.0", V2, {"mm_prefix": True}, False),
        ("0.28.0", V1, {"mm_prefix": True}, True),
    ],
)
def test_a_drafts_own_backend_matters_where_the_version_has_the_fault(
    version: str, runner: str, changes: dict[str, bool], used: bool
) -> None:
    facts = dataclasses.replace(DFLASH, vllm=Version(version), runner=runner, proposer=None, **changes)
    assert worker_use.uses_of(facts, LIVE)["dflash-draft-backend"]["used"] is used


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"sizes_set": True}, True),
        ({"sizes_set": True, "runner": V2, "drafts_here": False, "proposer": None}, True),
        ({}, False),
        # What the attention backend decided later.
        ({"sizes_set": True, "decode_graphs": False}, False),
        ({"sizes_set": True, "method": None}, False),
    ],
)
def test_capture_sizes_are_used_where_they_are_set_and_captured(changes: dict[str, Any], used: bool) -> None:
    uses = worker_use.uses_of(dataclasses.replace(EAGLE, **changes), ["capture-sizes"])
    assert uses["capture-sizes"]["used"] is used


V2_LIVE = ("v2-draft-metadata", "v2-fused-drafts", "v2-capture-metadata", "v2-graph-addresses")
STEPS = WorkerFacts(Version("0.26.0"), V2, "eagle3", 3, drafter="EagleSpeculator", fuses=True, decode_graphs=True)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, {"v2-draft-metadata", "v2-fused-drafts", "v2-capture-metadata"}),
        ({"sleeps": True}, set(V2_LIVE)),
        ({"decode_graphs": False}, {"v2-draft-metadata"}),
        ({"fuses": False}, {"v2-draft-metadata", "v2-capture-metadata"}),
        # That two draft tokens have no steps to put together, v2-fused-drafts says by itself.
        ({"num_speculative_tokens": 2}, {"v2-fused-drafts", "v2-capture-metadata"}),
        # It builds the metadata that it captures with.
        ({"method": "dflash", "num_speculative_tokens": 2, "fuses": False}, set()),
        ({"runner": V1, "sleeps": True}, set()),
        ({"method": None, "sleeps": True}, {"v2-graph-addresses"}),
        ({"drafts_here": False}, set()),
    ],
)
def test_what_takes_part_on_model_runner_v2(changes: dict[str, Any], used: set[str]) -> None:
    uses = worker_use.uses_of(dataclasses.replace(STEPS, **changes), V2_LIVE)
    assert {name for name, use in uses.items() if use["used"]} == used
    assert all(bool(use["reason"]) is not use["used"] for use in uses.values())


# -- a worker ---------------------------------------------------------------------------------------------------------


def worker_on(runner: SimpleNamespace, *, v2: bool, method: str, mode: CUDAGraphMode) -> SimpleNamespace:
    """What is read of vLLM's worker, and nothing more."""
    spec = SimpleNamespace(method=method, num_speculative_tokens=3, attention_backend=None)
    config = SimpleNamespace(
        speculative_config=spec,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        attention_config=SimpleNamespace(backend=None),
        model_config=SimpleNamespace(is_mm_prefix_lm=False, enable_sleep_mode=False, has_inner_state=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0),
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        kv_transfer_config=None,
    )
    return SimpleNamespace(
        vllm_config=config, model_runner=runner, use_v2_model_runner=v2, rank=0, is_driver_worker=True
    )


def uses() -> dict[str, Use]:
    entry = journal.current()
    assert entry is not None
    return entry.uses


def test_a_worker_on_model_runner_v2_says_that_its_drafter_is_not_the_patched_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = SimpleNamespace(speculator=object(), drafter=None)
    with caplog.at_level("INFO", "vllm.hwplugin"):
        worker_use.report_worker(worker_on(runner, v2=True, method="eagle3", mode=CUDAGraphMode.FULL))
    assert not any(use["used"] for use in uses().values())
    assert "Model Runner V2" in uses()["draft-full-graph"]["reason"]
    (line,) = caplog.messages
    assert all(name in line for name in LIVE)


def test_a_feature_that_is_on_ends_the_start_of_an_engine_that_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "on")
    runner = SimpleNamespace(speculator=object(), drafter=None)
    worker = worker_on(runner, v2=True, method="eagle3", mode=CUDAGraphMode.FULL)
    with pytest.raises(FeatureRequired, match=r"VLLM_HWPLUGIN_DRAFT_FULL_GRAPH=on.*Model Runner V2"):
        worker_use.report_worker(worker)
    # Another stage of the pipeline drafts.
    runner.speculator = None
    worker_use.report_worker(worker)
    # What mends a fault is not missed where the fault is not.
    monkeypatch.setenv("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "auto")
    monkeypatch.setenv("VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM", "on")
    runner.speculator = object()
    worker_use.report_worker(worker)
    assert not uses()["dflash-context-norm"]["used"]


def test_a_real_proposer_without_graphs_is_not_counted_as_using_them(make: Callable[..., Any]) -> None:
    proposer = make("loop", drafters.EAGLE, 3)
    worker = worker_on(SimpleNamespace(drafter=proposer), v2=False, method="eagle3", mode=CUDAGraphMode.NONE)
    worker_use.report_worker(worker)
    assert not uses()["draft-full-graph"]["used"]
    assert "NONE" in uses()["draft-full-graph"]["reason"]
    worker.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    worker_use.report_worker(worker)
    assert uses()["draft-full-graph"] == uses()["draft-loop-graph"] == {"used": True, "reason": ""}


def test_steps_count_from_the_report_on_and_one_rank_speaks_for_the_engine(make: Callable[..., Any]) -> None:
    counts = StepCounts("a-feature", "part")
    counts.served()
    runner = SimpleNamespace(drafter=make("loop", drafters.EAGLE, 3))
    worker = worker_on(runner, v2=False, method="eagle3", mode=CUDAGraphMode.FULL)
    worker.vllm_config.parallel_config.data_parallel_index = 3
    entry, engines = journal.current(), []
    assert entry is not None
    for driver, drafter in ((False, runner.drafter), (True, None), (True, runner.drafter)):
        worker.is_driver_worker, runner.drafter = driver, drafter
        worker_use.report_worker(worker)
        engines.append(entry.engine)
    assert engines == [None, None, 3]
    assert counts.outcomes() == {}


def test_what_a_feature_found_out_outweighs_the_configuration_before_and_after(make: Callable[..., Any]) -> None:
    worker = worker_on(
        SimpleNamespace(drafter=make("loop", drafters.EAGLE, 3)), v2=False, method="eagle3", mode=CUDAGraphMode.FULL
    )
    stays_stock("draft-loop-graph", "step by step", "found while building")
    worker_use.report_worker(worker)
    assert uses()["draft-loop-graph"] == {"used": False, "reason": "found while building"}
    assert uses()["draft-full-graph"]["used"]
    stays_stock("draft-full-graph", "as in stock", "found while serving")
    assert uses()["draft-full-graph"] == {"used": False, "reason": "found while serving"}
    (kept,) = (item for item in journals.read_all(journal._folder.parent))  # type: ignore[union-attr]
    assert kept.uses == uses()


def test_a_vllm_that_keeps_its_facts_elsewhere_costs_the_report_and_not_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_use.report_worker(SimpleNamespace(vllm_config=None))
    assert uses() == {}
    (line,) = caplog.records
    assert (line.levelname, line.exc_info is not None) == ("WARNING", True)


def test_an_operation_that_honours_weight_rows_leaves_the_norm_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(dflash_context_norm, "_answers", {})
    x, weights = torch.ones(2, 3, 8), torch.ones(2, 8)

    def right(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out.copy_(x * scale * weight.reshape(-1, 1, x.shape[-1]) if weight.dim() == 2 else x * scale * weight)

    def first_row_alone(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        right(out, x, weight if weight.dim() == 1 else weight[0], eps)

    assert dflash_context_norm.context_norm_obstacle() is None
    dflash_context_norm.norm_rows(right, torch.empty_like(x), x, weights, 1e-6)
    assert dflash_context_norm.context_norm_obstacle() is not None
    dflash_context_norm.norm_rows(first_row_alone, torch.empty_like(x), x, weights, 1e-6)
    assert dflash_context_norm.context_norm_obstacle() is None


# -- every released worker --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report_alone() -> Catalogue:
    catalogue = load_catalogue()
    return catalogue._replace(features=tuple(f for f in catalogue.features if f.id == "engine-report"))


@pytest.mark.parametrize("version", versions("vllm/v1/worker/", "vllm/config/"))
def test_the_report_is_the_last_thing_before_a_worker_is_ready(
    vllm_tree: Callable[[str], Any], report_alone: Catalogue, version: str
) -> None:
    """After the capture of graphs, which is where features decide at the latest, and in every path that returns."""
    plan = make_plan(report_alone, vllm_tree(version), {})
    for path, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        tree = ast.parse(plan.files[f"vllm/v1/worker/{path}.py"].text)
        (worker,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        methods = {node.name: node for node in worker.body if isinstance(node, ast.FunctionDef)}
        body = methods.get("_compile_or_warm_up_model", methods["compile_or_warm_up_model"]).body
        assert [node for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Return)] == [body[-1]]
        assert ast.unparse(body[-2]) == "report_worker(self)"


@pytest.mark.parametrize("version", versions("vllm/v1/worker/", "vllm/config/"))
def test_what_is_read_of_a_worker_exists(vllm_tree: Callable[[str], Any], version: str) -> None:
    def text(path: str) -> str:
        found: str = vllm_tree(version).read(f"vllm/{path}.py")
        return found

    assert "self.use_v2_model_runner = " in text("v1/worker/gpu_worker")
    assert all(f"self.{name} = {name}" in text("v1/worker/worker_base") for name in ("rank", "is_driver_worker"))
    assert "self.speculator" in text("v1/worker/gpu/model_runner")
    assert "self.drafter" in text("v1/worker/gpu_model_runner")
    model = text("config/model")
    assert all(f"    def {name}(self)" in model for name in ("is_mm_prefix_lm", "has_inner_state"))
    assert "    backend: AttentionBackendEnum" in text("config/attention")
    assert "    reasoning_parser: str" in text("config/structured_outputs")
    assert "    structured_outputs_config: " in text("config/vllm")
    sizes = ("pipeline_parallel_size", "data_parallel_size", "data_parallel_index", "_api_process_rank")
    assert all(f"    {name}: int" in text("config/parallel") for name in sizes)
    assert "    cudagraph_mode: CUDAGraphMode" in text("config/compilation")
