# SPDX-License-Identifier: Apache-2.0
"""The MUSA platform's worker and communicator under vLLM's own methods that call them, of every supported version."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm_hwplugin.patching import SUPPORTED

from . import realvllm
from .realvllm import Load, own

every_version = pytest.mark.parametrize("version", SUPPORTED)
COMMUNICATORS = "vllm/distributed/device_communicators"


@pytest.fixture
def musa_vllm(real_vllm: Load, musa_host: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`musa_vllm(version, *paths)` runs these modules of vLLM for real, and gives the platform that they see."""

    def load(version: str, *paths: str) -> Any:
        for path in paths:
            name = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
            monkeypatch.setitem(realvllm.REAL, name, path)
        real_vllm(version)
        platform = own("vllm_hwplugin.platforms.musa").MusaPlatform()
        importlib.import_module("vllm.platforms").current_platform = platform
        return platform

    return load


@every_version
def test_weights_and_cache_come_from_torchs_allocator(
    version: str, musa_vllm: Callable[..., Any], vllm_tree: Callable[[str], Any]
) -> None:
    """vLLM's ``load_model``, and what its later methods allocate in."""
    allocator = "vllm/device_allocator/__init__.py"
    known = [allocator] if vllm_tree(version).read(allocator) else []
    platform = musa_vllm(version, "vllm/v1/worker/gpu_worker.py", *known)
    base = importlib.import_module("vllm.v1.worker.worker_base")
    base.WorkerBase = type("WorkerBase", (), {})
    importlib.import_module("vllm.sequence").IntermediateTensors = type("IntermediateTensors", (), {})
    importlib.import_module("vllm.tracing").instrument = lambda **_: lambda method: method
    class_ = own("vllm_hwplugin.platforms.musa_worker").MusaWorker
    worker = class_.__new__(class_)
    worker.vllm_config, worker.model_runner = MagicMock(), MagicMock()
    # What vLLM's own configuration says where the platform has neither.
    assert not platform.is_sleep_mode_available()
    worker.vllm_config.model_config.enable_sleep_mode = False
    worker.vllm_config.model_config.enable_cumem_allocator = False
    worker.vllm_config.weight_transfer_config = None
    worker.load_model()
    worker.model_runner.load_model.assert_called_once()
    for tag in ("workspace", "kv_cache", "runtime"):
        with worker._maybe_get_memory_pool_context(tag) as pool:
            assert pool is None


@every_version
def test_graphs_are_captured_with_more_than_one_gpu(
    version: str, musa_vllm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's ``GroupCoordinator.graph_capture`` on a group of two, whose communicator is made as the group makes it."""
    import torch

    names = ("base_device_communicator", "cuda_communicator", "xpu_communicator")
    musa_vllm(version, "vllm/distributed/parallel_state.py", *(f"{COMMUNICATORS}/{name}.py" for name in names))
    state = importlib.import_module("vllm.distributed.parallel_state")
    importlib.import_module("vllm.config").get_current_vllm_config_or_none = lambda: None
    aiter = importlib.import_module("vllm._aiter_ops").rocm_aiter_ops
    aiter.is_enabled.return_value = False
    class_ = own("vllm_hwplugin.platforms.musa_communicator").MusaCommunicator
    group = state.GroupCoordinator.__new__(state.GroupCoordinator)
    members = type("Members", (), {"rank": lambda _: 1, "size": lambda _: 2})()
    group.device_communicator = class_(
        cpu_group=members,
        device=torch.device("cpu"),
        device_group=members,
        unique_name="tp:0",
        global_ranks=[0, 1],
        global_world_size=2,
    )
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    context = state.GraphCaptureContext(stream)
    with group.graph_capture(context) as found:
        assert found is context


@every_version
def test_the_communicator_has_nothing_of_cudas(
    version: str, musa_vllm: Callable[..., Any], vllm_tree: Callable[[str], Any]
) -> None:
    """Each part that ``CudaCommunicator`` makes is there and is none, and no collective is CUDA's."""
    names = ("base_device_communicator", "cuda_communicator")
    musa_vllm(version, *(f"{COMMUNICATORS}/{name}.py" for name in names))
    class_ = own("vllm_hwplugin.platforms.musa_communicator").MusaCommunicator
    base = sys.modules["vllm.distributed.device_communicators.base_device_communicator"].DeviceCommunicatorBase
    made = _set_by_init(vllm_tree(version).read(f"{COMMUNICATORS}/cuda_communicator.py"), "CudaCommunicator")
    parts = made - _set_by_init(
        vllm_tree(version).read(f"{COMMUNICATORS}/base_device_communicator.py"), "DeviceCommunicatorBase"
    )
    assert "ca_comm" in parts
    assert {name: getattr(class_, name) for name in parts if getattr(class_, name)} == {}
    methods = {name for name, member in vars(base).items() if callable(member)}
    assert {name for name in methods if getattr(class_, name) is not getattr(base, name)} == {"all_reduce"}


def _set_by_init(text: str, name: str) -> set[str]:
    (cls,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name]
    (init,) = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
