# SPDX-License-Identifier: Apache-2.0
"""The MUSA platform's worker and communicator under vLLM's own methods that call them, of every supported version."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ..conftest import versions
from ..platforms import realvllm
from ..platforms.realvllm import REAL, Load, own
from .test_triton_gaps import vendors

FILES = (*REAL.values(), "vllm/device_allocator/", "vllm/v1/worker/", "vllm/v1/sample/", "vllm/distributed/")
every_version = pytest.mark.parametrize("version", versions(*FILES))


@pytest.fixture
def musa_vllm(real_vllm: Load, musa_host: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`musa_vllm(version, *paths)` runs these modules of vLLM for real, and gives the platform that they see."""

    def load(version: str, *paths: str) -> Any:
        for path in paths:
            name = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
            monkeypatch.setitem(realvllm.REAL, name, path)
        real_vllm(version)
        platform = own("vllm_hwplugin.musa.platform").MusaPlatform()
        importlib.import_module("vllm.platforms").current_platform = platform
        return platform

    return load


@every_version
def test_weights_and_cache_come_from_torchs_allocator(
    version: str, musa_vllm: Callable[..., Any], vllm_tree: Callable[[str], Any], monkeypatch: Any
) -> None:
    """vLLM's ``load_model``, and what its later methods allocate in.

    Captures after it are each thread's own, and masks are sorted as numbers.
    """
    import torch

    modes: list[str] = []

    class Graph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            modes.append(capture_error_mode)

    monkeypatch.setattr(torch, "musa", SimpleNamespace(MUSAGraph=Graph), raising=False)
    sorted_as: list[Any] = []
    monkeypatch.setattr(torch, "argsort", lambda values, **_: sorted_as.append(values.dtype))
    # It needs more of vLLM than is here.
    monkeypatch.setitem(sys.modules, "vllm_hwplugin.musa.layers", MagicMock())
    allocator = "vllm/device_allocator/__init__.py"
    worker = _gpu_worker(musa_vllm, version, *([allocator] if vllm_tree(version).read(allocator) else []))
    # What vLLM's own configuration says where the platform has neither.
    worker.vllm_config.model_config.enable_sleep_mode = False
    worker.vllm_config.model_config.enable_cumem_allocator = False
    worker.vllm_config.weight_transfer_config = None
    worker.load_model()
    worker.model_runner.load_model.assert_called_once()
    Graph().capture_begin()
    Graph().capture_begin(capture_error_mode="relaxed")
    assert modes == ["thread_local", "relaxed"]
    for dtype in (torch.bool, torch.float32):
        torch.argsort(torch.ones(1, dtype=dtype), stable=True)
    assert sorted_as == [torch.int32, torch.float32]
    for tag in ("workspace", "kv_cache", "runtime"):
        with worker._maybe_get_memory_pool_context(tag) as pool:
            assert pool is None


def _gpu_worker(musa_vllm: Callable[..., Any], version: str, *paths: str) -> Any:
    """A `MusaWorker` over that version's ``Worker``, without what its ``__init__`` makes."""
    musa_vllm(version, "vllm/v1/worker/gpu_worker.py", *paths)
    importlib.import_module("vllm.v1.worker.worker_base").WorkerBase = type("WorkerBase", (), {})
    importlib.import_module("vllm.sequence").IntermediateTensors = type("IntermediateTensors", (), {})
    importlib.import_module("vllm.tracing").instrument = lambda **_: lambda method: method
    class_ = own("vllm_hwplugin.musa.worker").MusaWorker
    worker = class_.__new__(class_)
    for name in (
        "vllm_config", "model_runner", "model_config", "cache_config", "parallel_config", "compilation_config",
        "observability_config", "init_snapshot",
    ):  # fmt: skip
        setattr(worker, name, MagicMock())
    worker.device, worker.parallel_config.data_parallel_size = "cpu", 1
    worker.observability_config.jit_monitor_mode = "warn"
    return worker


@pytest.mark.parametrize("triton", ["3.2.0", "3.6.0"])
@every_version
def test_an_old_triton_ends_the_start_nowhere(
    version: str, triton: str, musa_vllm: Callable[..., Any], vllm_tree: Callable[[str], Any], monkeypatch: Any
) -> None:
    """vLLM's ``compile_or_warm_up_model``, at whose end it starts to watch Triton."""
    monitors = ("vllm/triton_utils/jit_monitor.py", "vllm/utils/jit_monitor.py")
    monitors = [path for path in monitors if vllm_tree(version).read(path)]
    module = ModuleType("triton")
    module.runtime = runtime = ModuleType("triton.runtime")
    runtime.jit = ModuleType("triton.runtime.jit")
    runtime.jit.serialize_specialization_data = None
    hooks = SimpleNamespace(jit_post_compile_hook=None)
    if triton == "3.6.0":
        module.knobs = SimpleNamespace(runtime=hooks, autotuning=SimpleNamespace(print=False))
    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, eval(name, {"triton": module}))
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    monkeypatch.setitem(sys.modules, "tilelang", None)
    worker = _gpu_worker(musa_vllm, version, *monitors)
    utils = importlib.import_module("vllm.triton_utils")
    utils.HAS_TRITON, utils.triton = True, module
    worker.use_v2_model_runner = False
    worker.vllm_config.kernel_config.enable_jit_warmup = triton == "3.6.0"
    worker.model_config.enforce_eager = True
    worker.cache_config.kv_cache_memory_bytes = None
    worker.compilation_config = worker.vllm_config.compilation_config
    worker.compilation_config.compile_sizes = []
    importlib.import_module("vllm.distributed.parallel_state").get_pp_group().is_last_rank = False
    worker.compile_or_warm_up_model()
    assert (hooks.jit_post_compile_hook is not None) == bool(monitors and triton == "3.6.0")


@every_version
def test_an_old_triton_does_not_sample(version: str, musa_vllm: Callable[..., Any], monkeypatch: Any) -> None:
    """vLLM's ``apply_top_k_top_p``, in a worker that has started on a host with the Triton that vllm-musa pins."""
    import torch

    names = ("topk_topp_sampler", "topk_topp_triton")
    musa_vllm(version, f"vllm/v1/sample/ops/{names[0]}.py")
    importlib.import_module("vllm.triton_utils").HAS_TRITON = True
    worker_module = importlib.import_module("vllm.v1.worker.gpu_worker")
    worker_module.Worker = type("Worker", (), {"init_device": lambda self: None})
    monkeypatch.setenv("VLLM_HWPLUGIN_SELF_TEST", "0")
    kernel = importlib.import_module(f"vllm.v1.sample.ops.{names[1]}").apply_top_k_top_p_triton
    own_worker = own("vllm_hwplugin.musa.worker")
    sampler = importlib.import_module(f"vllm.v1.sample.ops.{names[0]}")
    sampler.current_platform = importlib.import_module("vllm.platforms").current_platform
    logits = torch.arange(10.0).repeat(9, 1)
    worker = own_worker.MusaWorker()
    worker.device_config = SimpleNamespace(device_type="musa")

    def kept() -> Any:
        return sampler.apply_top_k_top_p(logits.clone(), torch.full((9,), 3), None)

    jit: Any = importlib.import_module("triton.runtime.jit")
    monkeypatch.setattr(jit, "_make_pointer_alias_spec", vendors, raising=False)
    for installed, in_triton in (("3.6.0", True), ("3.2.0", False)):
        monkeypatch.setattr(own_worker.versions, "installed", {"triton": installed}.get)
        worker.init_device()
        kernel.reset_mock()
        result = kept()
        assert kernel.called is in_triton
    assert result.isfinite().sum(1).tolist() == [3] * 9
    # And arguments that share memory are counted as Triton numbers them.
    assert jit._make_pointer_alias_spec is not vendors
    assert monkeypatch.delitem(sys.modules, "triton.backends.mtgpu.musa_testing") is None
