# SPDX-License-Identifier: Apache-2.0
"""The platform classes against every supported vLLM's own ``Platform``, CUDA classes, resolver and plugin loader."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin import plugin
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.platforms import _offer
from vllm_hwplugin.platforms._offer import CLASSES

from ..conftest import versions
from . import standins
from .contract import faults, not_given, overrides
from .realvllm import REAL, Load, entry_points, own, point

FILES = (*REAL.values(), "vllm/v1/worker/", "vllm/engine/", "vllm/distributed/")
every_version = pytest.mark.parametrize("version", versions(*FILES))
INTERFACE = "vllm/platforms/interface.py"


@every_version
@pytest.mark.parametrize("nvml", [True, False], ids=["nvml", "jetson"])
def test_the_cuda_class_is_cuda_and_overrides_three_methods(
    version: str, nvml: bool, real_vllm: Load, dflash: list[str]
) -> None:
    real_vllm(version, nvml=nvml)
    stock = importlib.import_module("vllm.platforms.cuda")
    interface = importlib.import_module("vllm.platforms.interface")
    cls = own("vllm_hwplugin.platforms.cuda").CudaPlatform
    assert cls.__base__ is (stock.NvmlCudaPlatform if nvml else stock.NonNvmlCudaPlatform)
    assert set(overrides(cls)) == {
        "apply_config_platform_defaults",
        "check_and_update_config",
        "get_attn_backend_cls",
    }
    assert faults(cls, interface.Platform) == []


@every_version
@pytest.mark.usefixtures("musa_host")
def test_the_musa_class_keeps_the_contract_of_an_out_of_tree_platform(
    version: str, real_vllm: Load, vllm_tree: Callable[[str], Any]
) -> None:
    real_vllm(version)
    cuda = importlib.import_module("vllm.platforms.cuda")
    interface = importlib.import_module("vllm.platforms.interface")
    cls = own("vllm_hwplugin.musa.platform").MusaPlatform
    newer = SUPPORTED[SUPPORTED.index(version) + 1 :]
    later = {
        node.name
        for name in newer
        for top in ast.parse(vllm_tree(name).read(INTERFACE)).body
        if isinstance(top, ast.ClassDef) and top.name == "Platform"
        for node in top.body
        if isinstance(node, ast.FunctionDef)
    }
    assert faults(cls, interface.Platform, (cuda.NvmlCudaPlatform, cuda.CudaPlatformBase), later) == []
    # Only elastic expert parallelism asks for it, which needs an all-to-all manager that MUSA does not have.
    elastic = ["stateless_init_device_torch_dist_pg"]
    assert not_given(cls, vllm_tree(version).read(INTERFACE), interface.Platform) == elastic
    platform = cls()
    assert platform.is_out_of_tree()
    assert not platform.is_cuda_alike()
    # What the class does not define is torch.musa's, by vLLM's own rule.
    assert platform.is_available()


@pytest.fixture
def resolver(real_vllm: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """vLLM's resolver and plugin loader; which of its own platforms are there is set, and this plugin is installed."""

    def load(version: str, *builtins: str, rivals: tuple[Any, ...] = ()) -> Any:
        real_vllm(version)
        # The real function calls the plugin's with the arguments that vLLM gives, so the count is vLLM's own.
        calls: list[str | None] = []

        def asked() -> str | None:
            calls.append(plugin.platform())
            return calls[-1]

        mine = SimpleNamespace(name="hwplugin", value=_offer.OWN, group=_offer.GROUP, load=lambda: asked)
        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points([mine, *rivals]))
        platforms = importlib.import_module("vllm.platforms")
        classes = {"cuda": "vllm.platforms.cuda.CudaPlatform", "cpu": "vllm.platforms.interface.UnspecifiedPlatform"}
        assert set(classes) < set(platforms.builtin_platform_plugins)
        for name in platforms.builtin_platform_plugins:
            answer = classes.get(name) if name in builtins else None
            platforms.builtin_platform_plugins[name] = lambda answer=answer: answer
        platforms.calls = calls
        return platforms

    return load


@every_version
def test_vllms_resolver_takes_the_cuda_class(version: str, resolver: Callable[..., Any]) -> None:
    platforms = resolver(version, "cuda")
    assert platforms.resolve_current_platform_cls_qualname() == CLASSES["cuda"]
    assert platforms.calls == [CLASSES["cuda"]] * 2
    assert platforms._current_platform is None
    assert platforms.current_platform.is_cuda()
    used = platforms._current_platform
    assert f"{type(used).__module__}.{type(used).__qualname__}" == CLASSES["cuda"]


@every_version
@pytest.mark.usefixtures("musa_host")
def test_vllms_resolver_takes_the_musa_class(
    version: str, resolver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_musa", standins.torchada())
    platforms = resolver(version)
    assert platforms.resolve_current_platform_cls_qualname() == CLASSES["musa"]
    assert platforms.current_platform.device_type == "musa"


@every_version
def test_with_a_rival_vllm_starts_in_auto_and_stops_where_the_class_is_named(
    version: str, resolver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    platforms = resolver(version, "cuda", rivals=(point("vendor", "vendor.Platform"),))
    assert platforms.resolve_current_platform_cls_qualname() == "vendor.Platform"
    _offer.decision.cache_clear()
    caplog.clear()
    monkeypatch.setenv("VLLM_HWPLUGIN_PLATFORM", "cuda")
    with pytest.raises(RuntimeError, match="Only one platform plugin can be activated"):
        platforms.resolve_current_platform_cls_qualname()
    assert "VLLM_PLUGINS=hwplugin" in caplog.text
