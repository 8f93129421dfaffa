# SPDX-License-Identifier: Apache-2.0
"""What the MUSA platform does, on the oldest and the newest ``Platform`` and stand-ins of the vendor's packages."""

from __future__ import annotations

import ast
import contextlib
import copy
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.base import run_records
from vllm_hwplugin.musa import _vllm_api

from ..conftest import versions
from ..platforms.realvllm import Load, own

FIRST, LAST = "0.20.0", "0.33.0"


@pytest.fixture(params=[FIRST, LAST])
def platform(
    request: pytest.FixtureRequest, real_vllm: Load, musa_host: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    real_vllm(request.param)
    return own("vllm_hwplugin.musa.platform").MusaPlatform()


def test_facts_are_of_the_gpu_that_is_visible(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (platform.get_device_name(), platform.device_count()) == ("MTT S5000", 3)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "2,0")
    assert platform.device_count() == 2
    assert platform.get_device_name() == "MTT S4000"
    assert platform.get_device_uuid(1) == "uuid-0"
    assert platform.get_device_total_memory(0) == 48 << 30
    # Facts of the host do not depend on what is visible.
    assert platform.get_all_gpu_pci_bus_ids() == {0: "0000:3b:00.0", 1: "0000:5e:00.0", 2: "0000:86:00.0"}


@pytest.mark.parametrize(
    ("visible", "count", "named"),
    [("0", 1, None), ("0,none,1", 1, "none"), ("1, 2", 2, None), ("2,3,0", 1, "3"), ("-1", 0, "-1")],
)
def test_an_id_that_is_no_gpu_ends_the_list(
    visible: str,
    count: int,
    named: str | None,
    platform: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", visible)
    assert [platform.device_count() for _ in range(2)] == [count, count]
    assert [record.args[1].partition(" ")[0] for record in caplog.records] == ([] if named is None else [repr(named)])


@pytest.mark.parametrize("version", versions("vllm/config/compilation.py"))
def test_every_switch_of_vllms_passes_is_a_fusion_that_is_switched_off_or_known(
    version: str, vllm_tree: Callable[[str], Any]
) -> None:
    """A switch under a new name would fuse into kernels that are not there."""
    text = vllm_tree(version).read("vllm/config/compilation.py")
    (passes,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "PassConfig"]
    switches = {
        node.target.id
        for node in passes.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "bool"
    }
    settings = SimpleNamespace(**dict.fromkeys(switches, True), fuse_never=None)
    named = _vllm_api.switch_off_fusions(settings)
    assert {name for name, on in vars(settings).items() if on} == {"eliminate_noops"} == switches - set(named)
    assert settings.fuse_never is None


@pytest.mark.parametrize("version", [FIRST, LAST])
def test_ray_leaves_both_variables_of_the_visible_gpus_alone(
    version: str, real_vllm: Load, musa_host: list[Any], vllm_tree: Callable[[str], Any]
) -> None:
    """vLLM's executor tells Ray's workers so, by the environment that it starts them with."""
    real_vllm(version)
    text = vllm_tree(version).read("vllm/v1/executor/ray_executor_v2.py")
    (cls,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "RayExecutorV2"]
    (method,) = [node for node in cls.body if getattr(node, "name", "") == "_build_runtime_env"]
    platform = own("vllm_hwplugin.musa.platform").MusaPlatform()
    scope: dict[str, Any] = {"copy": copy, "current_platform": platform}
    scope["update_runtime_env_for_worker_import"] = lambda _: None
    # By itself: its module needs packages that are not here.
    exec(f"from __future__ import annotations\n{ast.unparse(method)}", scope)
    settings = SimpleNamespace(ray_runtime_env=None, ray_workers_use_nsight=False)
    made = scope[method.name](SimpleNamespace(parallel_config=settings))
    # torchada makes each of the two the other's copy.
    for device in ("CUDA", "MUSA"):
        assert made["env_vars"][f"RAY_EXPERIMENTAL_NOSET_{device}_VISIBLE_DEVICES"] == "1"


def config(**passes: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls="auto", world_size_across_dp=1),
        model_config=SimpleNamespace(is_mm_prefix_lm=False, is_hybrid=False),
        speculative_config=None,
        scheduler_config=SimpleNamespace(is_multimodal_model=True, disable_chunked_mm_input=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**passes), cudagraph_capture_sizes=[]),
    )


def test_a_configuration_gets_worker_and_passes_and_dflash_comes_last(platform: Any, dflash: list[str]) -> None:
    made = config(fuse_norm_quant=True, eliminate_noops=True)
    platform.apply_config_platform_defaults(made)
    assert dflash == ["note_user_sizes"]
    platform.check_and_update_config(made)
    assert dflash == ["note_user_sizes", "check_and_update_config", "set sizes"]
    assert made.parallel_config.worker_cls == "vllm_hwplugin.musa.worker.MusaWorker"
    assert vars(made.compilation_config.pass_config) == {"fuse_norm_quant": False, "eliminate_noops": True}
    assert made.scheduler_config.disable_chunked_mm_input is False


@pytest.mark.parametrize(
    ("triton", "spec", "live", "v2", "refused"),
    [
        ("3.2.0", {"method": "eagle3"}, (), "0", "VLLM_HWPLUGIN_NEXT_TOKEN_KERNEL=auto"),
        ("3.2.0+musa5.2", {"method": "eagle3"}, ("next-token-kernel",), "0", ""),
        ("3.2.0", {"method": "eagle3"}, ("next-token-kernel",), "1", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("3.2.0", {"method": "eagle3", "disable_padded_drafter_batch": True}, (), "0", ""),
        ("3.2.0", {"method": "ngram"}, (), "0", ""),
        ("3.6.0", {"method": "mtp"}, (), "1", ""),
    ],
)
def test_a_drafter_that_cannot_run_is_refused_at_the_start(
    triton: str,
    spec: dict[str, Any],
    live: tuple[str, ...],
    v2: str,
    refused: str,
    platform: Any,
    dflash: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["vllm_hwplugin.musa.versions"], "installed", {"triton": triton}.get)
    monkeypatch.setattr(run_records, "current", lambda: SimpleNamespace(live=live))
    made = config()
    made.speculative_config = SimpleNamespace(**spec)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        platform.check_and_update_config(made)


@pytest.mark.parametrize(
    ("vllm", "states", "refused"),
    [("0.27.0", "align", False), ("0.28.0", "none", False), ("0.28.0", "align", True)],
)
def test_a_hybrid_with_drafts_and_prefix_cache_is_refused_where_a_kernel_does_not_compile(
    vllm: str, states: str, refused: bool, platform: Any, dflash: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"triton": "3.2.0", "vllm": vllm}
    monkeypatch.setattr(sys.modules["vllm_hwplugin.musa.versions"], "installed", installed.get)
    monkeypatch.setattr(run_records, "current", lambda: SimpleNamespace(live=("next-token-kernel",)))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    made = config()
    made.speculative_config, made.cache_config = SimpleNamespace(method="mtp"), SimpleNamespace(mamba_cache_mode=states)
    made.compilation_config.cudagraph_mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
    made.model_config.is_hybrid = True
    with pytest.raises(ValueError, match="--no-enable-prefix-caching") if refused else contextlib.nullcontext():
        platform.check_and_update_config(made)


def test_images_are_not_split_where_the_model_attends_in_both_directions(
    platform: Any, dflash: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    made = config()
    made.model_config.is_mm_prefix_lm = True
    for _ in range(2):
        platform.check_and_update_config(made)
        assert made.scheduler_config.disable_chunked_mm_input is True
    assert ["multimodal" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("named", [False, True])
def test_a_hybrid_verifies_drafts_in_full_graphs_only_where_they_are_named(
    named: bool, platform: Any, dflash: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pieces, full = (SimpleNamespace(has_full_cudagraphs=lambda full=full: full) for full in (False, True))
    modes: Any = ModuleType("vllm.config.compilation")
    modes.CUDAGraphMode = SimpleNamespace(PIECEWISE=pieces)
    # `real_vllm` restores vLLM's modules; `monkeypatch` would undo this after it, and take the restored module away.
    sys.modules[modes.__name__] = modes
    made = config()
    made.compilation_config.cudagraph_mode = full if named else None
    made.model_config.is_hybrid, made.scheduler_config.async_scheduling = True, True
    platform.apply_config_platform_defaults(made)
    # Without drafts nothing is in the way of a graph.
    assert made.compilation_config.cudagraph_mode is (full if named else None)
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    made.speculative_config = object()
    for _ in range(2):
        platform.apply_config_platform_defaults(made)
        platform.check_and_update_config(made)
    assert made.compilation_config.cudagraph_mode is (full if named else pieces)
    assert made.scheduler_config.async_scheduling is False
    (line,) = caplog.messages
    assert ("in the FULL graphs that you named" if named else "without FULL graphs") in line


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("auto_gptq", {}, ""),
        ("auto_awq", {}, ""),
        ("fp8", {"weight_bits": 8}, ""),
        ("gptq", {}, "this GPTQ checkpoint needs vLLM 0.22 or later"),
        ("awq_marlin", {}, "this AWQ checkpoint needs vLLM 0.24 or later"),
        ("auto_gptq", {"weight_bits": 8}, "has 8 bits, expected 4"),
        ("auto_gptq", {"desc_act": True}, "is ordered by activations"),
        ("auto_awq", {"experts": True}, "has experts"),
    ],
)
def test_a_checkpoint_of_four_bits_that_no_kernel_serves_is_refused_before_the_engine_starts(
    name: str, changes: dict[str, Any], reason: str, platform: Any, dflash: list[str]
) -> None:
    made = config()
    made.model_config.is_moe = changes.get("experts", False)
    made.quant_config = SimpleNamespace(get_name=lambda: name, **{"weight_bits": 4} | changes)
    with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
        platform.check_and_update_config(made)


def test_the_environment_is_prepared_and_the_users_values_stay(
    platform: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Set first, so that what the platform sets is taken back after the test.
    estimate = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD", estimate):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_GPU_SYNC_CHECK", "warn")
    caplog.set_level(logging.WARNING, "vllm.hwplugin")
    platform.pre_register_and_update()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == os.environ[estimate] == "0"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert "VLLM_GPU_SYNC_CHECK" not in os.environ
    assert caplog.messages == [
        "VLLM_WORKER_MULTIPROC_METHOD=fork on MUSA, expected spawn: vLLM may fail; unset it",
        "VLLM_GPU_SYNC_CHECK=warn is unset on MUSA: torch_musa has no such check",
    ]


def test_the_worker_is_vllms_own_with_the_device_it_looks_for(
    real_vllm: Load, musa_host: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    seen: list[str] = []

    class Worker:
        def __init__(self) -> None:
            self.device_config = SimpleNamespace(device_type="musa")

        def init_device(self) -> None:
            seen.append(self.device_config.device_type)

    real_vllm(LAST)
    stock = ModuleType("vllm.v1.worker.gpu_worker")
    stock.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", stock)
    monkeypatch.setenv("VLLM_HWPLUGIN_SELF_TEST", "0")
    worker = own("vllm_hwplugin.musa.worker").MusaWorker()
    is_available = torch.cuda.is_available
    worker.init_device()
    assert (seen, worker.device_config.device_type) == (["cuda"], "musa")
    assert torch.cuda.is_available is is_available
    monkeypatch.setattr(torch.musa, "get_device_capability", lambda: (2, 2))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"this GPU has MUSA 2\.2, expected 3\.1"):
        worker.init_device()
