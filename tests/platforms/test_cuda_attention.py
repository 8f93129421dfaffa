# SPDX-License-Identifier: Apache-2.0
"""When a layer runs on the plugin's FLASH_ATTN on CUDA: the rules alone, then under every vLLM's own choice."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from vllm_hwplugin.platforms import _cuda_attention as attention
from vllm_hwplugin.platforms._cuda_attention import Asked, Baseline, decide

from ..conftest import versions
from .realvllm import REAL, Load, own

every_version = pytest.mark.parametrize("version", versions(*REAL.values(), "vllm/vllm_flash_attn/"))
FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
OWN = "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"
FITS: tuple[str, ...] = ()


# -- the rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "asked", "stock", "refused", "own", "reason"),
    [
        ("on", Asked(9, foreign=True), Baseline("FLASH_ATTN"), FITS, False, "another plugin"),
        ("on", Asked(9, "TRITON_ATTN"), Baseline("TRITON_ATTN"), FITS, False, "TRITON_ATTN is named"),
        ("on", Asked(9, obstacle="no nvcc"), Baseline("TRITON_ATTN"), FITS, True, "=on; on Triton kernels: no nvcc"),
        ("auto", Asked(9), Baseline("TRITON_ATTN"), FITS, True, "faster than vLLM's TRITON_ATTN .* 9.x: docs/"),
        ("auto", Asked(9, obstacle="no nvcc"), Baseline("TRITON_ATTN"), FITS, False, "not available: no nvcc"),
        ("auto", Asked(9), Baseline("FLASH_ATTN"), FITS, False, "not known to be faster than FLASH_ATTN"),
        ("auto", Asked(9, "FLASH_ATTN"), Baseline("FLASH_ATTN", "no cutlass"), FITS, True, "cannot run here"),
        ("auto", Asked(10), Baseline("FLASH_ATTN"), FITS, False, "not known .* compute capability 10.x"),
        ("auto", Asked(8, "FLASH_ATTN"), Baseline(None), FITS, True, "vLLM has no backend that fits"),
        ("auto", Asked(9), Baseline("FLASH_ATTN"), ("no fp8",), False, "does not fit: no fp8"),
    ],
)
def test_decide(gate: str, asked: Asked, stock: Baseline, refused: tuple[str, ...], own: bool, reason: str) -> None:
    found = decide(gate, asked, stock, refused)
    assert found.own is own
    assert re.search(reason, found.reason)
    assert found.error == ""


# -- under vLLM's own choice -------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """The fields of ``AttentionSelectorConfig`` that vLLM's platforms read."""

    head_size: int = 512
    kv_cache_dtype: str | None = "auto"
    block_size: int | None = None
    use_mla: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_non_causal: bool = False


def backend(name: str, refuses: Callable[[dict[str, Any]], list[str]]) -> type:
    def validate_configuration(**asked: Any) -> list[str]:
        return refuses(asked)

    members = {
        "validate_configuration": staticmethod(validate_configuration),
        "get_name": staticmethod(lambda: name),
        "full_cls_name": classmethod(lambda cls: (cls.__module__, cls.__qualname__)),
    }
    return type(f"{name}Backend", (), members)


class Host:
    """A GPU under a version of vLLM whose backends refuse what they are told to refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.refuses: dict[str, Callable[[dict[str, Any]], list[str]]] = {}
        self._monkeypatch = monkeypatch
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        self.known = registry.AttentionBackendEnum
        self.platform = own("vllm_hwplugin.platforms.cuda").CudaPlatform
        interface = importlib.import_module("vllm.platforms.interface")
        monkeypatch.setattr(
            self.platform, "get_device_capability", lambda *_: interface.DeviceCapability(*capability), raising=False
        )
        for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT"):
            self._put(self.known[name].get_path(), name)
        self._put(OWN, "own")
        self.model = SimpleNamespace(multimodal_config=None, model_arch_config=SimpleNamespace(head_size=512))
        monkeypatch.setattr(attention, "_model_config", lambda: self.model)

    def _put(self, path: str, name: str) -> None:
        module, _, cls = path.rpartition(".")
        made = ModuleType(module)
        answer = backend("FLASH_ATTN" if name == "own" else name, lambda asked: self.refuses.get(name, _no)(asked))
        made.__dict__[cls] = answer
        answer.__module__, answer.__qualname__ = module, cls
        self._monkeypatch.setitem(sys.modules, module, made)

    def refuse(self, *names: str, why: str = "refused", when: Callable[[dict[str, Any]], bool] = bool) -> None:
        for name in names:
            self.refuses[name] = lambda asked: [why] if when(asked) else []

    def ask(self, named: str | None = None, **config: Any) -> str:
        selected = None if named is None else self.known[named]
        return self.platform().get_attn_backend_cls(selected, attn_selector_config=Config(**config), num_heads=8)


def _no(asked: dict[str, Any]) -> list[str]:
    return []


@pytest.fixture(autouse=True)
def _all_of_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 4 and the plugin's CUDA kernel have what they need."""
    monkeypatch.setattr(attention, "missing_for_fa4", lambda: "")
    monkeypatch.setattr(attention, "_obstacle", lambda major, minor: "")


@pytest.fixture
def host(real_vllm: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    def make(version: str, capability: tuple[int, int] = (9, 0)) -> Host:
        real_vllm(version)
        return Host(monkeypatch, capability)

    return make


Hosts = Callable[..., Host]


@pytest.mark.parametrize("kind", ["use_mla", "use_sparse"])
def test_layers_with_backends_of_their_own_are_vllms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "on")
    config = Config(head_size=576, **{kind: True})
    # Nothing else is asked: neither the device nor the plugin's class.
    assert (
        attention.choose(lambda *asked: f"{asked[0]} for {asked[2]} heads", "MLA", config, 8, None) == "MLA for 8 heads"
    )


@every_version
def test_a_large_head_on_hopper_is_the_plugins(version: str, host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = host(version)
    # Against FlashAttention 4 nothing was measured.
    assert gpu.ask() == gpu.ask("FLASH_ATTN") == FLASH
    with monkeypatch.context() as no_fa4:
        no_fa4.setattr(attention, "missing_for_fa4", lambda: "no cutlass")
        assert gpu.ask() == gpu.ask("FLASH_ATTN") == OWN
    gpu.refuse("FLASH_ATTN", "FLASHINFER", why="head_size not supported", when=lambda asked: asked["head_size"] > 256)
    assert gpu.ask() == OWN
    assert gpu.ask(use_non_causal=True) == OWN
    assert gpu.ask("FLASH_ATTN") == OWN
    assert gpu.ask("TRITON_ATTN") == gpu.known["TRITON_ATTN"].get_path()


@every_version
def test_without_its_cuda_kernel_the_plugin_serves_only_what_vllm_does_not(
    version: str, host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(attention, "_obstacle", lambda *capability: asked.append(capability) or "no nvcc")
    gpu = host(version)
    gpu.refuse("FLASH_ATTN", "FLASHINFER")
    with pytest.raises(ValueError, match="refused"):
        gpu.ask("FLASH_ATTN", head_size=256)
    assert asked == []
    assert gpu.ask() == gpu.known["TRITON_ATTN"].get_path()
    assert asked == [(9, 0)]
    gpu.refuse("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", when=lambda asked: asked["use_non_causal"])
    assert gpu.ask(use_non_causal=True) == OWN
    assert gpu.ask("FLASH_ATTN") == OWN
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "on")
    assert gpu.ask() == OWN


@every_version
def test_the_gate(version: str, host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = host(version)
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "off")
    assert gpu.ask() == gpu.ask("FLASH_ATTN") == FLASH
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "on")
    gpu.refuse("own", why="no fp8")
    with pytest.raises(ValueError, match=r"VLLM_HWPLUGIN_ATTENTION=on, but .*no fp8"):
        gpu.ask()
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "auto")
    assert gpu.ask() == FLASH
    monkeypatch.setenv("VLLM_HWPLUGIN_ATTENTION", "maybe")
    assert gpu.ask() == FLASH


@every_version
def test_a_flash_attn_of_another_plugin_stays(version: str, host: Hosts) -> None:
    gpu = host(version)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    module = ModuleType("made_up_plugin")
    module.Backend = backend("FLASH_ATTN", _no)  # type: ignore[attr-defined]
    module.Backend.__module__, module.Backend.__qualname__ = "made_up_plugin", "Backend"  # type: ignore[attr-defined]
    sys.modules["made_up_plugin"] = module
    try:
        registry.register_backend(gpu.known.FLASH_ATTN, "made_up_plugin.Backend")
        assert gpu.ask() == gpu.ask("FLASH_ATTN") == "made_up_plugin.Backend"
    finally:
        del sys.modules["made_up_plugin"]


@every_version
def test_images_that_cannot_come_need_no_mask(version: str, host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = host(version)
    for name in ("FLASH_ATTN", "own"):
        gpu.refuse(name, why="no mask", when=lambda asked: asked["use_mm_prefix"])
    images: dict[str, Any] = {"use_mm_prefix": True}

    def settings(**values: Any) -> None:
        gpu.model.multimodal_config = SimpleNamespace(**values)

    for multimodal in ({"language_model_only": False}, {"language_model_only": True, "enable_mm_embeds": True}):
        settings(**multimodal)
        for size in (256, 512):
            with pytest.raises(ValueError, match="no mask"):
                gpu.ask("FLASH_ATTN", head_size=size, **images)
    settings(language_model_only=True)
    assert gpu.ask("FLASH_ATTN", head_size=512, **images) == OWN
    assert gpu.ask("FLASH_ATTN", head_size=256, **images) == FLASH
    with monkeypatch.context() as gate:
        gate.setenv("VLLM_HWPLUGIN_ATTENTION", "off")
        with pytest.raises(ValueError, match="no mask"):
            gpu.ask("FLASH_ATTN", head_size=256, **images)
    # Where FlashAttention 4 is what vLLM would take for the mask, and cannot run, the others keep FLASH_ATTN as well.
    assert gpu.ask(head_size=256, **images) == gpu.known["FLASHINFER"].get_path()
    with monkeypatch.context() as no_fa4:
        no_fa4.setattr(attention, "missing_for_fa4", lambda: "no cutlass")
        assert gpu.ask(head_size=256, **images) == FLASH
        assert gpu.ask(head_size=512, **images) == OWN
        settings(language_model_only=False)
        assert gpu.ask(head_size=256, **images) == gpu.known["FLASHINFER"].get_path()
    # The text part of such a checkpoint alone.
    gpu.model.multimodal_config = None
    assert gpu.ask("FLASH_ATTN", head_size=512, **images) == OWN
    # A model without large heads is vLLM's own business.
    gpu.model.model_arch_config.head_size = 256
    with pytest.raises(ValueError, match="no mask"):
        gpu.ask("FLASH_ATTN", head_size=256, **images)
    gpu.model.model_arch_config.per_layer_overrides = [{}, {"head_size": 512}]
    assert gpu.ask("FLASH_ATTN", head_size=256, **images) == FLASH
