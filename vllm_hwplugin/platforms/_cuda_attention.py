# SPDX-License-Identifier: Apache-2.0
"""The choice of the plugin's FLASH_ATTN on CUDA: layers with heads above 256, where it is faster or the only backend.

vLLM chooses first, layer by layer; its choice or refusal is an input of :func:`decide`. Heads up to 256 always run on
vLLM's choice.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm_hwplugin.attention.backends import CUDA, FASTER, KERNEL, LARGEST_OF_VLLM
from vllm_hwplugin.base import gates, log, run_records
from vllm_hwplugin.ops.compile import jit
from vllm_hwplugin.ops.compile.spec import KERNELS

logger = logging.getLogger("vllm.hwplugin")

GATE: Final = "VLLM_HWPLUGIN_ATTENTION"


@dataclasses.dataclass(frozen=True)
class Asked:
    """The request for a layer with heads above 256.

    Args:
        major: Major version of the device's compute capability.
        named: The backend that the user, or vLLM for the model, has named; None: no name.
        foreign: Whether another plugin has registered its own FLASH_ATTN.
        obstacle: Why the plugin's CUDA kernel is not available, so that its Triton kernels would run; or empty.
        strict: Whether to end the start if the plugin should serve the layer and fails.
    """

    major: int
    named: str | None = None
    foreign: bool = False
    obstacle: str = ""
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class Baseline:
    """vLLM's choice for the layer.

    Args:
        backend: The backend's name; None: vLLM refuses the layer.
        broken: Why the backend cannot run although it declares support; or empty.
    """

    backend: str | None
    broken: str = ""


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The backend of a layer.

    Args:
        own: True: the plugin's class; False: vLLM's choice, or its error.
        error: The error that must end the start; or empty.
    """

    own: bool
    reason: str
    error: str = ""


def decide(gate: str, asked: Asked, baseline: Baseline, refused: Sequence[str], broken: str = "") -> LayerChoice:
    """Choose the plugin's class or vLLM's choice for large heads.

    Args:
        gate: ``auto`` or ``on``.
        refused: Why the plugin's class does not fit the layer; or empty.
        broken: Why the class cannot be imported or asked for any layer; or empty.
    """
    if asked.foreign:
        return LayerChoice(False, "another plugin has registered its own FLASH_ATTN")
    if asked.named not in (None, CUDA.name):
        return LayerChoice(False, f"{asked.named} is named")
    if refused or broken:
        why = broken or f"the plugin's FLASH_ATTN does not fit: {'; '.join(refused)}"
        demand = f"{GATE}=on, but " if gate == "on" else f"{gates.STRICT}=1, but " if asked.strict and broken else ""
        return LayerChoice(False, why, demand + why if demand or baseline.backend is None else "")
    kernels = f"; on Triton kernels: {asked.obstacle}" if asked.obstacle else ""
    if gate == "on":
        return LayerChoice(True, f"{GATE}=on{kernels}")
    if baseline.backend is None:
        return LayerChoice(True, f"vLLM has no backend that fits{kernels}")
    if baseline.broken:
        return LayerChoice(True, f"vLLM's {baseline.backend} cannot run here: {baseline.broken}{kernels}")
    than = f"{baseline.backend} on compute capability {asked.major}.x"
    measured = FASTER.get((asked.major, baseline.backend))
    if measured is None:
        return LayerChoice(False, f"not known to be faster than {than}")
    if not asked.obstacle:
        return LayerChoice(True, f"faster than vLLM's {than}: {measured}")
    why = f"the plugin's CUDA kernel would be faster but is not available: {asked.obstacle}"
    return LayerChoice(False, why, f"{gates.STRICT}=1, but {why}; set {GATE}=off to use vLLM's" if asked.strict else "")


Ask = Callable[..., str]


def setting() -> str:
    """Return the switch's value; ``off`` if it is invalid."""
    # A process reports an invalid value at its start.
    try:
        return gates.read(GATE).text
    except gates.GateError:
        return "off"


def choose(vllm: Ask, selected: Any | None, config: Any, num_heads: int | None, capability: Any) -> str:
    """Return the qualified name of a layer's backend class, for ``get_attn_backend_cls``.

    Args:
        vllm: ``get_attn_backend_cls`` of vLLM's platform.
        selected: The named member of ``AttentionBackendEnum``, or None.
        config: vLLM's ``AttentionSelectorConfig`` for the layer.
        num_heads: Query heads of the layer.
        capability: The device's ``DeviceCapability``.

    Raises:
        ValueError: No backend fits, or the named one does not; with the reasons of vLLM and the plugin.
    """
    gate = setting()
    # MLA and sparse layers have other backends.
    if gate == "off" or config.use_mla or config.use_sparse:
        return vllm(selected, config, num_heads)
    text = _without_images(config)
    # Of vLLM's fast backends only FlashAttention 4 has the mask for images. If it cannot run, vLLM must not choose it
    # for a mask that no batch needs.
    wanted = text if missing_for_fa4() else config
    if config.head_size <= LARGEST_OF_VLLM:
        if text is config or largest_head(_model_config()) <= LARGEST_OF_VLLM:
            return vllm(selected, config, num_heads)
        path, error = _ask(vllm, selected, wanted, num_heads)
        return path if error is None else vllm(selected, text, num_heads)
    asked = Asked(
        major=capability.major,
        named=None if selected is None else selected.name,
        foreign=_foreign(selected),
        obstacle=_obstacle(capability.major, capability.minor),
        strict=gates.read(gates.STRICT).flag,
    )
    path, error = _ask(vllm, selected, wanted, num_heads)
    baseline = _baseline(path)
    refused, broken = _refused(text, capability)
    choice = decide(gate, asked, baseline, refused, broken=broken)
    _report(config, choice, baseline)
    if choice.error:
        raise ValueError(f"no attention backend for heads of {config.head_size}: {choice.error}") from error
    if error is not None and not choice.own:
        raise error
    return CUDA.path if choice.own else path


def _ask(vllm: Ask, selected: Any | None, config: Any, num_heads: int | None) -> tuple[str, ValueError | None]:
    try:
        return vllm(selected, config, num_heads), None
    except ValueError as error:
        return "", error


def _baseline(path: str) -> Baseline:
    if not path:
        return Baseline(None)
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name).get_name()
    return Baseline(backend, missing_for_fa4() if backend == CUDA.name else "")


def _refused(config: Any, capability: Any) -> tuple[list[str], str]:
    """Return why the plugin's class does not fit, or is broken."""
    try:
        backend = getattr(importlib.import_module(CUDA.module), CUDA.cls)
        reasons: list[str] = backend.validate_configuration(device_capability=capability, **config._asdict())
    except Exception as error:
        # vLLM's base classes may be missing or different.
        logger.debug("the plugin's FLASH_ATTN cannot be asked", exc_info=True)
        return [], f"the plugin's FLASH_ATTN cannot be imported or asked: {type(error).__name__}: {error}"
    return reasons, ""


@functools.cache
def _obstacle(major: int, minor: int) -> str:
    try:
        return jit.obstacle(KERNELS[KERNEL], (major, minor))
    except Exception as error:
        # A failed search for a compiler must not end a start that needs none.
        logger.debug("the search for the plugin's CUDA kernel failed", exc_info=True)
        return f"{type(error).__name__}: {error}"


def _foreign(selected: Any | None) -> bool:
    if selected is None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        selected = AttentionBackendEnum[CUDA.name]
    return bool(selected.name == CUDA.name and selected.is_overridden())


@functools.cache
def missing_for_fa4() -> str:
    """Return why FlashAttention 4 cannot compile here; empty: it can.

    Packages that vLLM does not check for compile it at its first call. This function checks only whether they are
    installed, not whether they can be imported.
    """
    missing = [name for name in ("cutlass", "quack") if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"FlashAttention 4 needs {' and '.join(missing)} (nvidia-cutlass-dsl, quack-kernels), not installed"


# -- models with bidirectional attention within images -----------------------------------------------------------------


def _without_images(config: Any) -> Any:
    """Return the configuration, without image masks if no images are accepted."""
    if not config.use_mm_prefix:
        return config
    settings = getattr(_model_config(), "multimodal_config", None)
    takes_images = settings is not None and (
        not settings.language_model_only or getattr(settings, "enable_mm_embeds", False)
    )
    return config if takes_images else config._replace(use_mm_prefix=False)


def largest_head(model_config: Any | None) -> int:
    """Return the model's largest head size; 0 without a model."""
    architecture = getattr(model_config, "model_arch_config", None)
    if architecture is None:
        return 0
    # Up to 0.27 a model's head size is its largest; from 0.28 on, layers with another size are listed.
    layers = getattr(architecture, "per_layer_overrides", None) or []
    return max(int(architecture.head_size), *(int(layer.get("head_size", 0)) for layer in layers), 0)


def _model_config() -> Any | None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else config.model_config


# -- log and run record ------------------------------------------------------------------------------------------------


def _report(config: Any, choice: LayerChoice, baseline: Baseline) -> None:
    layers = f"heads of {config.head_size}{', non-causal' if config.use_non_causal else ''}"
    backend = "the plugin's FLASH_ATTN" if choice.own else f"vLLM's {baseline.backend or 'error'}"
    log.once(f"attention with {layers}: {backend} ({choice.reason})", logging.INFO)
    run_records.note(f"attention, {layers}", f"{backend}: {choice.reason}")
