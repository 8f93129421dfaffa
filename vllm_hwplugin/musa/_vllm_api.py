# SPDX-License-Identifier: Apache-2.0
"""The differences of vLLM 0.20 to 0.33 for the MUSA platform, with their versions."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

logger = logging.getLogger("vllm.hwplugin")

# Switches of vLLM's PassConfig that fuse operations of vllm._C; later versions add fusions with this prefix.
_FUSION_PREFIX: Final = "fuse_"
_FUSIONS: Final = ("enable_sp", "enable_qk_norm_rope_fusion")

# The monitors of compilation while serving: the first name from 0.21 on, the second from 0.25 on.
_JIT_MONITORS: Final = ("vllm.triton_utils.jit_monitor", "vllm.utils.jit_monitor")

# The registry of MLA prefill backends: from 0.21 on; open to plugins from 0.23 on.
_MLA_PREFILLS: Final = "vllm.v1.attention.backends.mla.prefill.registry"


def switch_off_fusions(pass_config: Any) -> tuple[str, ...]:
    """Switch off fusions that need ``vllm._C``, and return their names."""
    fusions = [name for name in vars(pass_config) if name.startswith(_FUSION_PREFIX) or name in _FUSIONS]
    on = tuple(name for name in fusions if getattr(pass_config, name) is True)
    for name in on:
        setattr(pass_config, name, False)
    return on


def triton_has_knobs() -> bool:
    """Whether vLLM's Triton has ``triton.knobs`` (from 3.4 on); False without Triton."""
    triton: Any = importlib.import_module("vllm.triton_utils").triton
    return hasattr(triton, "knobs")


def switch_off_jit_warmup(vllm_config: Any) -> bool:
    """Switch off kernel compilation at warm-up; return whether it was on."""
    # vLLM has this option from 0.27 on.
    kernel_config: Any = getattr(vllm_config, "kernel_config", None)
    if not getattr(kernel_config, "enable_jit_warmup", False):
        return False
    kernel_config.enable_jit_warmup = False
    return True


def switch_off_jit_monitor() -> None:
    """Disable this process's monitor of late compilation, which needs ``triton.knobs``."""
    # Up to 0.29 vLLM's worker always starts the monitor.
    for name in _JIT_MONITORS:
        if importlib.util.find_spec(name) is not None:
            monitor: Any = importlib.import_module(name)
            monitor.activate = lambda **_: None


def sample_without_triton() -> None:
    """Make top-k and top-p use torch's sort, as vLLM without Triton."""
    sampler: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler.HAS_TRITON = False


def mask_without_inductor() -> None:
    """Make xgrammar, if it is installed, mask logits eagerly."""
    # On a device that it does not know, it compiles the function with Inductor at the first request with a grammar,
    # after graphs were captured.
    try:
        module: Any = importlib.import_module("xgrammar.kernels.apply_token_bitmask_inplace_torch_compile")
    except ImportError:
        return
    for name, function in list(vars(module).items()):
        # `torch.compile` leaves the original function there.
        if (original := getattr(function, "__wrapped__", None)) is not None:
            setattr(module, name, original)


def bind_caches_of_one_layer() -> None:
    """Let vLLM bind two KV caches to one layer number (hybrids)."""
    # Up to 0.27 vLLM asks whether it knows the device, later it asks the platform.
    utils: Any = importlib.import_module("vllm.v1.worker.utils")
    platform: Any = importlib.import_module("vllm.platforms.interface").Platform
    if not hasattr(platform, "check_runner_kv_caches_multi_layer"):
        # The module asks the platform nothing else.
        utils.current_platform = SimpleNamespace(is_cuda_alike=lambda: True)


def capture_by_thread(musa: Any) -> None:
    """Make graph captures forbid unsafe calls only in the capturing thread."""
    # MCCL's watchdog queries events in its own thread, which torch_musa 2.7.1 does not exempt, as torch exempts NCCL's.
    begin = musa.MUSAGraph.capture_begin
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def capture_begin(graph: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        mode = "thread_local" if capture_error_mode == "global" else capture_error_mode
        begin(graph, pool=pool, capture_error_mode=mode)

    musa.MUSAGraph.capture_begin = capture_begin


def sort_masks_as_numbers() -> None:
    """Make `torch.argsort` sort a mask as int32, for metadata of recurrent layers."""
    # vllm-musa does so in that metadata; torch_musa's own tests of sort have no mask.
    argsort = torch.argsort
    if hasattr(argsort, "__wrapped__"):
        return

    @functools.wraps(argsort)
    def sort_numbers(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return argsort(values.int() if values.dtype == torch.bool else values, *args, **options)

    torch.argsort = sort_numbers


def set_streams_by_vllm(cuda: Any, musa: Any) -> None:
    """Make stream contexts call vLLM's `set_stream`, which replaces only ``torch.cuda.set_stream``."""
    # Else vLLM takes the default stream for the current one once it has copied outputs on another stream, and an engine
    # that starts later in this process can capture nothing.
    musa.set_stream = cuda.set_stream


@contextmanager
def taken_for_cuda(device_config: Any, cuda: Any, musa: Any) -> Iterator[None]:
    """Present the device as ``cuda`` while vLLM's GPU worker starts it.

    All versions test for the name ``cuda``; the code after the test works for any device behind ``torch.cuda``. 0.20 to
    0.23 also test ``torch.cuda.is_available()``, which torchada leaves False.
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
    """Register vLLM's MLA prefill backend FLASH_ATTN, unless another plugin has."""
    try:
        registry: Any = importlib.import_module(_MLA_PREFILLS)
        register, member = registry.register_mla_prefill_backend, registry.MLAPrefillBackendEnum.FLASH_ATTN
    except (ImportError, AttributeError):
        logger.warning("MLA on MUSA needs vLLM 0.23 or later, and mate: this vLLM cannot compute its prompts")
        return
    if not member.is_overridden():
        register(member, path)
