# SPDX-License-Identifier: Apache-2.0
"""How vLLM 0.20 to 0.33 differ for the MUSA platform: in one place, each difference with its versions."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

logger = logging.getLogger("vllm.hwplugin")

# Switches of vLLM's PassConfig that fuse operations of vllm._C, which a MUSA host does not have. Later versions add
# fusions under the same prefix.
_FUSION_PREFIX: Final = "fuse_"
_FUSIONS: Final = ("enable_sp", "enable_qk_norm_rope_fusion")

# What tells of kernels that are compiled while requests are served: from 0.21 on, under the second name from 0.25 on.
_JIT_MONITORS: Final = ("vllm.triton_utils.jit_monitor", "vllm.utils.jit_monitor")

# Which classes compute the prompts of MLA: from 0.21 on, and others than vLLM's from 0.23 on.
_MLA_PREFILLS: Final = "vllm.v1.attention.backends.mla.prefill.registry"


def switch_off_fusions(pass_config: Any) -> tuple[str, ...]:
    """Switch off the passes that fuse into kernels of ``vllm._C``, and return the names of those that were on."""
    on = tuple(
        name
        for name in vars(pass_config)
        if (name.startswith(_FUSION_PREFIX) or name in _FUSIONS) and getattr(pass_config, name) is True
    )
    for name in on:
        setattr(pass_config, name, False)
    return on


def triton_has_knobs() -> bool:
    """Whether the Triton that vLLM uses has ``triton.knobs``, as from 3.4 on; it has none where there is no Triton."""
    triton: Any = importlib.import_module("vllm.triton_utils").triton
    return hasattr(triton, "knobs")


def switch_off_jit_warmup(vllm_config: Any) -> bool:
    """Let kernels be compiled when they are first used, and say whether that is a change. A switch from 0.27 on."""
    kernel_config: Any = getattr(vllm_config, "kernel_config", None)
    changes: bool = getattr(kernel_config, "enable_jit_warmup", False)
    if changes:
        kernel_config.enable_jit_warmup = False
    return changes


def switch_off_jit_monitor() -> None:
    """Let vLLM's worker start without its monitor of kernels that are compiled late, in this process.

    Up to 0.29 the worker starts the monitor whatever is configured.
    """
    for name in _JIT_MONITORS:
        try:
            monitor: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            monitor.activate = _activate_nothing


def _activate_nothing(**_: Any) -> None:
    logger.debug("vLLM's monitor of late compilation stays off: it needs triton.knobs")


def sample_without_triton() -> None:
    """Let top-k and top-p be done by torch's sort in this process, as vLLM does where there is no Triton."""
    sampler: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler.HAS_TRITON = False


def capture_by_thread(musa: Any) -> None:
    """Let the capture of a graph forbid unsafe calls in its own thread alone, in this process.

    By default, as vLLM captures, it forbids them in all threads. MCCL's watchdog asks for events in one of its own, and
    torch_musa 2.7.1 does not exempt it, as torch does NCCL's: its question would break the capture.

    Args:
        musa: ``torch.musa``.
    """
    begin = musa.MUSAGraph.capture_begin
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        mode = "thread_local" if capture_error_mode == "global" else capture_error_mode
        begin(graph, pool=pool, capture_error_mode=mode)

    musa.MUSAGraph.capture_begin = capture_begin


@contextmanager
def taken_for_cuda(device_config: Any, cuda: Any, musa: Any) -> Iterator[None]:
    """Let vLLM's GPU worker start its device: it does so only where the configuration says ``cuda``.

    That is the test in all versions; what follows it is the same for any device that answers to ``torch.cuda``, as MUSA
    does through torchada. 0.20 to 0.23 also count devices only where ``torch.cuda.is_available()``, which torchada
    leaves False.

    Args:
        device_config: vLLM's ``DeviceConfig``.
        cuda: ``torch.cuda``, as torchada has left it.
        musa: ``torch.musa``.
    """
    device_type, is_available = device_config.device_type, cuda.is_available
    device_config.device_type = "cuda"
    cuda.is_available = musa.is_available
    try:
        yield
    finally:
        device_config.device_type = device_type
        cuda.is_available = is_available


@functools.cache
def register_mla_prefill(path: str) -> None:
    """Have vLLM compute the prompts of MLA by a class, which has the name FLASH_ATTN there. Can be done from 0.23 on.

    On a device without a compute capability vLLM takes FLASH_ATTN, whose own class is for other devices. Another
    plugin's stays.

    Args:
        path: the qualified name of a ``MLAPrefillBackend``. It is imported when a layer is made.
    """
    try:
        registry: Any = importlib.import_module(_MLA_PREFILLS)
        register, member = registry.register_mla_prefill_backend, registry.MLAPrefillBackendEnum.FLASH_ATTN
    except (ImportError, AttributeError):
        logger.warning(
            "models with MLA cannot be served on MUSA by this vLLM, but from 0.23 on: their prompts need mate"
        )
        return
    if not member.is_overridden():
        register(member, path)
