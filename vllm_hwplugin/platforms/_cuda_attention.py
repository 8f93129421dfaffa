# SPDX-License-Identifier: Apache-2.0
"""Which layers run on the plugin's FLASH_ATTN on CUDA: those with heads above 256, where it is faster or alone.

vLLM answers first, layer by layer. Its choice or refusal is one of the facts that :func:`decide` goes by. Heads of up
to 256 are vLLM's own business.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm_hwplugin import gates, journal
from vllm_hwplugin.attention.backends import CUDA, Faster
from vllm_hwplugin.ops.compile import jit
from vllm_hwplugin.ops.compile.spec import KERNELS

logger = logging.getLogger("vllm.hwplugin")

GATE: Final = "VLLM_HWPLUGIN_ATTENTION"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is wanted for a layer with heads above 256.

    Args:
        major: of the device's compute capability.
        named: vLLM's name of the backend that the user, or vLLM for the model, has named; None where nothing is.
        foreign: another plugin has registered a FLASH_ATTN of its own.
        obstacle: why the plugin's CUDA kernel cannot be had, so that its Triton kernels would serve; empty where it
            probably can.
        strict: end the start if the plugin should serve and cannot, through a fault of its own or of its kernel.
    """

    major: int
    named: str | None = None
    foreign: bool = False
    obstacle: str = ""
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class Stock:
    """What vLLM says to it.

    Args:
        backend: the name of its choice; None where it refuses.
        broken: why that cannot run, though it is declared; empty where nothing is known against it.
    """

    backend: str | None
    broken: str = ""


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """What a layer runs on.

    Args:
        own: the plugin's class, else vLLM's word (its choice, or its error).
        reason: why.
        error: what the start must end with; empty where it need not.
    """

    own: bool
    reason: str
    error: str = ""


def decide(
    gate: str,
    asked: Asked,
    stock: Stock,
    refused: Sequence[str],
    measured: Sequence[Faster] = CUDA.large.faster,
    broken: str = "",
) -> LayerChoice:
    """Choose between the plugin's class and vLLM's word for a layer with heads above 256.

    Args:
        gate: ``auto`` or ``on``.
        refused: why the plugin's class does not fit the layer; empty where it does.
        broken: why the class cannot be imported or asked, whatever the layer; empty where it can.
    """
    if asked.foreign:
        return LayerChoice(False, "another plugin has registered its own FLASH_ATTN")
    if asked.named not in (None, CUDA.name):
        return LayerChoice(False, f"{asked.named} is named")
    if refused or broken:
        why = broken or f"the plugin's FLASH_ATTN does not fit: {'; '.join(refused)}"
        demand = f"{GATE}=on, but " if gate == "on" else f"{gates.STRICT}=1, but " if asked.strict and broken else ""
        return LayerChoice(False, why, demand + why if demand or stock.backend is None else "")
    kernels = f"; on Triton kernels: {asked.obstacle}" if asked.obstacle else ""
    if gate == "on":
        return LayerChoice(True, f"{GATE}=on{kernels}")
    if stock.backend is None:
        return LayerChoice(True, f"vLLM has none that fits{kernels}")
    if stock.broken:
        return LayerChoice(True, f"vLLM's {stock.backend} cannot run here: {stock.broken}{kernels}")
    for item in measured:
        if (item.major, item.than) != (asked.major, stock.backend):
            continue
        if asked.obstacle:
            why = f"the plugin's CUDA kernel would be faster and cannot be had: {asked.obstacle}"
            return LayerChoice(
                False, why, f"{gates.STRICT}=1, but {why}; set {GATE}=off to go on" if asked.strict else ""
            )
        return LayerChoice(
            True, f"faster than vLLM's {stock.backend} on compute capability {item.major}.x: {item.reason}"
        )
    return LayerChoice(False, f"not known to be faster than {stock.backend} on compute capability {asked.major}.x")


Ask = Callable[..., str]


def setting() -> str:
    """What the gate says; ``off`` where it says nothing that is known, which a process reports when it starts."""
    try:
        return gates.read(GATE).text
    except gates.GateError:
        return "off"


def choose(vllm: Ask, selected: Any | None, config: Any, num_heads: int | None, capability: Any) -> str:
    """The qualified name of a layer's backend class; for ``get_attn_backend_cls`` of the CUDA platform.

    Args:
        vllm: that method of vLLM's platform.
        selected: the named member of ``AttentionBackendEnum``, or None.
        config: vLLM's ``AttentionSelectorConfig`` for the layer.
        num_heads: query heads of the layer.
        capability: the device's ``DeviceCapability``.

    Raises:
        ValueError: no backend fits, or not the named one; with vLLM's reasons and the plugin's.
    """
    gate = setting()
    # MLA and sparse layers have backends of their own.
    if gate == "off" or config.use_mla or config.use_sparse:
        return vllm(selected, config, num_heads)
    text = _without_images(config)
    # Of vLLM's fast backends FlashAttention 4 alone has the mask; where it cannot run, it is not chosen for a mask that
    # is not needed.
    wanted = text if missing_for_fa4() else config
    if config.head_size <= CUDA.large.above:
        if text is config or largest_head(_model_config()) <= CUDA.large.above:
            return vllm(selected, config, num_heads)
        path, error = _ask(vllm, selected, wanted, num_heads)
        if error is not None:
            path, error = _ask(vllm, selected, text, num_heads)
        return _answer(path, error)
    asked = Asked(
        major=capability.major,
        named=None if selected is None else selected.name,
        foreign=_foreign(selected),
        obstacle=_obstacle(capability.major, capability.minor),
        strict=gates.read(gates.STRICT).flag,
    )
    path, error = _ask(vllm, selected, wanted, num_heads)
    stock = _stock(path)
    refused, broken = _refused(text, capability)
    choice = decide(gate, asked, stock, refused, broken=broken)
    _tell(config, choice, stock)
    if choice.error:
        raise ValueError(f"no attention backend for heads of {config.head_size}: {choice.error}") from error
    return CUDA.path if choice.own else _answer(path, error)


def _ask(vllm: Ask, selected: Any | None, config: Any, num_heads: int | None) -> tuple[str, ValueError | None]:
    try:
        return vllm(selected, config, num_heads), None
    except ValueError as error:
        return "", error


def _answer(path: str, error: ValueError | None) -> str:
    if error is not None:
        raise error
    return path


def _stock(path: str) -> Stock:
    if not path:
        return Stock(None)
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name).get_name()
    return Stock(backend, missing_for_fa4() if backend == CUDA.name else "")


def _refused(config: Any, capability: Any) -> tuple[list[str], str]:
    """Why the plugin's class does not fit the layer, and why it is not there to be asked."""
    try:
        backend = getattr(importlib.import_module(CUDA.module), CUDA.cls)
        reasons: list[str] = backend.validate_configuration(device_capability=capability, **config._asdict())
    except Exception as error:
        # vLLM's classes below it may be missing, or be others than those that it was written for.
        logger.debug("the plugin's FLASH_ATTN cannot be asked", exc_info=True)
        return [], f"the plugin's FLASH_ATTN cannot be imported or asked: {type(error).__name__}: {error}"
    return reasons, ""


@functools.cache
def _obstacle(major: int, minor: int) -> str:
    try:
        return jit.obstacle(KERNELS[CUDA.large.kernel], (major, minor))
    except Exception as error:
        # Looking for a compiler must not end a start that can do without.
        logger.debug("whether the plugin's CUDA kernel can be had cannot be told", exc_info=True)
        return f"{type(error).__name__}: {error}"


def _foreign(selected: Any | None) -> bool:
    if selected is None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        selected = AttentionBackendEnum[CUDA.name]
    return bool(selected.name == CUDA.name and selected.is_overridden())


@functools.cache
def missing_for_fa4() -> str:
    """What FlashAttention 4 needs and this host lacks; empty where all is there.

    vLLM counts it as installed if one of its files is. It is compiled at its first call, by packages that vLLM does not
    look for. This function only looks for them: it does not notice one that cannot be imported.
    """
    missing = [name for name in ("cutlass", "quack") if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"FlashAttention 4 needs {' and '.join(missing)} (nvidia-cutlass-dsl, quack-kernels), not installed"


# -- models whose images are seen in both directions -------------------------------------------------------------------


def _without_images(config: Any) -> Any:
    """The same without the demand for a mask for images, if the engine takes none and so no batch will need it."""
    if not config.use_mm_prefix:
        return config
    settings = getattr(_model_config(), "multimodal_config", None)
    takes_images = settings is not None and (
        not settings.language_model_only or getattr(settings, "enable_mm_embeds", False)
    )
    return config if takes_images else config._replace(use_mm_prefix=False)


def largest_head(model_config: Any | None) -> int:
    """Of the model's layers; 0 where there is no model."""
    architecture = getattr(model_config, "model_arch_config", None)
    if architecture is None:
        return 0
    # Up to 0.27 the head size of a model is its largest; from 0.28 on, layers that differ are listed.
    layers = getattr(architecture, "per_layer_overrides", None) or []
    return max(int(architecture.head_size), *(int(layer.get("head_size", 0)) for layer in layers), 0)


def _model_config() -> Any | None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else config.model_config


# -- what is told ------------------------------------------------------------------------------------------------------


def _tell(config: Any, choice: LayerChoice, stock: Stock) -> None:
    layers = f"heads of {config.head_size}{', non-causal' if config.use_non_causal else ''}"
    backend = "the plugin's FLASH_ATTN" if choice.own else f"vLLM's {stock.backend or 'error'}"
    _once(f"attention with {layers}: {backend} ({choice.reason})")
    journal.note(f"attention, {layers}", f"{backend}: {choice.reason}")


@functools.cache
def _once(text: str) -> None:
    logger.info("%s", text)
