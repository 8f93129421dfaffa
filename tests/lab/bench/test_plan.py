from __future__ import annotations

import dataclasses
import sys
from pkgutil import resolve_name

import pytest

from vllm_hwplugin.base import gates
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin_lab.bench import find_checkpoints
from vllm_hwplugin_lab.bench._worker import BenchWorker
from vllm_hwplugin_lab.bench.plan import (
    ALL_SIDES,
    MRV2_SIDES,
    PLUGIN_SIDES,
    SIDES,
    STOCK_OF,
    Case,
    NotOnThisHost,
    check,
    job_for,
    possible_sides,
)


def test_stock_on_musa_keeps_the_platform_class_and_no_feature(settings, gpu_host, tmp_path):
    host = dataclasses.replace(gpu_host, device="musa")
    switches = {feature.gate for feature in load_catalogue().features} | {
        "VLLM_HWPLUGIN_OPS",
        "VLLM_HWPLUGIN_ATTENTION",
    }
    asked = {**dict.fromkeys(switches, "on"), "VLLM_HWPLUGIN_NWOR_MODE": "restore"}
    settings = dataclasses.replace(settings, vllm_environment=asked)
    stock, patched = (
        job_for(Case("tiny", "eagle3", 3), side, settings, host, find_checkpoints(None), tmp_path).environment
        for side in ("stock", "patched")
    )
    assert gates.read("VLLM_HWPLUGIN", stock).flag
    assert gates.read("VLLM_HWPLUGIN_PLATFORM", stock).text == "auto"
    assert {stock[name] for name in switches} == {"off"}
    assert {name: patched[name] for name in switches} == asked


def test_a_side_may_have_the_plugin_without_what_patched_ones_set(settings, gpu_host, tmp_path):
    for plugin, patched in zip(PLUGIN_SIDES, STOCK_OF, strict=True):
        one, other = (
            job_for(Case("tiny", "eagle3", 3), side, settings, gpu_host, find_checkpoints(None), tmp_path)
            for side in (plugin, patched)
        )
        assert (one.options, one.patched) == (other.options, True)
        assert "ONE" not in one.environment
        assert {**one.environment, "ONE": "2"} == other.environment


def test_the_sides_of_the_other_runner_are_the_same_two(settings, gpu_host, tmp_path):
    # A runner that is set for all sides must not turn these into a second measurement of V1.
    settings = dataclasses.replace(settings, vllm_environment={"BOTH": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    jobs = {
        side: job_for(Case("tiny", "dflash", 7), side, settings, gpu_host, find_checkpoints(None), tmp_path)
        for side in ALL_SIDES
    }
    for stock, other in zip(SIDES, MRV2_SIDES, strict=True):
        v1, v2 = jobs[stock], jobs[other]
        assert (v2.options, v2.workloads, v2.patched) == (v1.options, v1.workloads, v1.patched)
        differing = {k for k in v2.environment if v2.environment[k] != v1.environment.get(k)}
        assert differing == {"VLLM_USE_V2_MODEL_RUNNER"}
        assert v2.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert {side: job.environment.get("ONE") for side, job in jobs.items()} == {
        "stock": None,
        "patched": "2",
        "mrv2": None,
        "mrv2-patched": "2",
    }
    differing = {k for k, value in jobs["patched"].environment.items() if value != jobs["stock"].environment.get(k)}
    assert differing == {"VLLM_HWPLUGIN", "ONE"}
    assert jobs["mrv2-patched"].label == "tiny dflash k=7 mrv2-patched"


def test_engines_that_are_alive_together_share_the_gpu_and_do_not_measure_its_memory(settings, gpu_host, tmp_path):
    settings = dataclasses.replace(settings, sides=ALL_SIDES, batches=(1, 32))
    case = Case("8b", "eagle3", 3)
    together = job_for(case, "patched", settings, gpu_host, None, tmp_path, own_process=True)
    assert together.options["gpu_memory_utilization"] * len(ALL_SIDES) == pytest.approx(0.9)
    # 37 layers of 8 heads of 128 keys and values in bfloat16, for 32 requests of the longest kind.
    least = 37 * 8 * 128 * 2 * 2 * 32 * together.options["max_model_len"]
    assert least <= together.options["kv_cache_memory_bytes"] <= 2 * least
    assert together.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    looked_at = job_for(case, "patched", settings, gpu_host, None, tmp_path)
    assert looked_at.options["kv_cache_memory_bytes"] == together.options["kv_cache_memory_bytes"]
    assert looked_at.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    chosen = dataclasses.replace(settings, gpu_memory_utilization=0.1)
    job = job_for(case, "patched", chosen, gpu_host, None, tmp_path, own_process=True)
    assert job.options["gpu_memory_utilization"] == 0.1


def test_a_dummy_eagle3_drafter_keeps_its_own_head(settings, gpu_host, tmp_path, monkeypatch):
    drafter = pytest.importorskip("vllm.model_executor.models.llama_eagle3").Eagle3LlamaForCausalLM
    # What vLLM's loader finds where it loads nothing.
    monkeypatch.setattr(drafter, "has_own_lm_head", False)
    # Whatever has imported it before.
    monkeypatch.delitem(sys.modules, "vllm_hwplugin_lab.bench._dummy_worker", raising=False)
    job = job_for(Case("8b", "eagle3", 5), "stock", settings, gpu_host, None, tmp_path)
    assert issubclass(resolve_name(job.options["worker_extension_cls"]), BenchWorker)
    assert drafter.has_own_lm_head


def test_model_runner_v2_on_a_cpu_is_refused(cpu_host):
    with pytest.raises(NotOnThisHost, match="--side mrv2-patched cannot be measured: Model Runner V2 needs a GPU"):
        check([Case("tiny", "eagle3", 3)], cpu_host, ("stock", "mrv2-patched"))
    assert possible_sides(["eagle3"], cpu_host) == SIDES
    # On MUSA the platform class leaves it out.
    assert possible_sides(["eagle3"], dataclasses.replace(cpu_host, device="musa")) == SIDES
