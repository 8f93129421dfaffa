# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention base classes and FlashAttention backend of any version, executed from their text.

Those modules, and the one with the base class for MLA's prompts, are that version's own. What they import of vLLM
beside that answers every name with a ``MagicMock``, except what a class needs to be built and run without a device: no
context parallelism, the cache layout NHD or HND, and a plain torch function in place of the Triton kernel that writes
the cache. torch is the installed one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from ..stubbed_vllm import StubbedVllm

REAL = {
    "vllm.v1.attention.backend": "vllm/v1/attention/backend.py",
    "vllm.v1.attention.backends.flash_attn": "vllm/v1/attention/backends/flash_attn.py",
    "vllm.v1.attention.backends.mla.prefill.base": "vllm/v1/attention/backends/mla/prefill/base.py",
}
# Made anew with each version, because they bind that version's classes.
OWN = (
    *(f"vllm_hwplugin.attention.{name}" for name in ("flash", "cuda")),
    *(f"vllm_hwplugin.musa.{name}" for name in ("_mate", "attention", "mla_prefill")),
)
PAGED = "vllm_hwplugin.attention.paged"


@contextmanager
def released(
    version: str,
    tree: Any,
    *,
    layout: str = "NHD",
    mate: ModuleType | None = None,
    paged: ModuleType | None = None,
    flash: tuple[int, ...] = (),
) -> Iterator[Any]:
    """Within it, ``load(name)`` imports a module on that version of vLLM.

    Args:
        layout: of the KV cache in memory, for the versions whose backends choose it.
        mate: the module of that name; by default there is none.
        paged: stands for the plugin's kernel; by default there is none.
        flash: the versions of FlashAttention that vLLM was built with, the one it takes last.
    """
    hook = StubbedVllm(version, tree, REAL, _given(version, layout, flash))
    before = dict(sys.modules)
    _forget()
    # None makes an import fail, also where another package of that name is installed.
    sys.modules["mate"] = mate  # type: ignore[assignment]
    sys.modules[PAGED] = paged  # type: ignore[assignment]
    sys.meta_path.insert(0, hook)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(hook)
        _forget()
        del sys.modules["mate"]
        sys.modules.update({name: module for name, module in before.items() if _bound(name) or name == "mate"})


def _bound(name: str) -> bool:
    return name.partition(".")[0] == "vllm" or name in OWN or name == PAGED


def _forget() -> None:
    for name in [name for name in sys.modules if _bound(name)]:
        del sys.modules[name]
    for name in (*OWN, PAGED):
        package, _, attribute = name.rpartition(".")
        vars(importlib.import_module(package)).pop(attribute, None)


def _given(version: str, layout: str, flash: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    one_process = SimpleNamespace(world_size=1, rank_in_group=0)
    return {
        "vllm.version": {"__version__": version},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_USE_V2_MODEL_RUNNER": False},
        "vllm.platforms": {"current_platform": MagicMock(is_xpu=lambda: False, device_type="cpu")},
        "vllm.v1.attention.backends.fa_utils": {
            "get_flash_attn_version": lambda **_: flash[-1] if flash else None,
            "is_fa_version_supported": lambda version: version in flash,
            "is_flash_attn_varlen_func_available": lambda: bool(flash),
            "flash_attn_supports_sinks": lambda: bool({3, 4}.intersection(flash)),
            "uses_fa4_hd256_kernel": lambda *_: False,
            "reshape_and_cache_flash": write_cache,
        },
        "vllm.v1.worker.ubatching": {"dbo_current_ubatch_id": lambda: 0},
        "vllm.v1.attention.backends.utils": {
            "get_kv_cache_layout": lambda: layout,
            "get_num_attention_heads_from_layers": lambda *_: 8,
        },
        "vllm.distributed.parallel_state": {
            "get_dcp_group": lambda: one_process,
            "get_pcp_group": lambda: one_process,
            "get_dcp_world_size_and_rank": lambda *_: (1, 0),
        },
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {"triton_reshape_and_cache_flash": write_cache},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda _: False},
        "vllm.v1.kv_cache_interface": {"is_quantized_kv_cache": lambda _: False},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.platforms.interface": {"DeviceCapability": lambda major, minor: (major, minor)},
        "vllm.model_executor.warmup.jit_warmup": {"VllmJitKernel": {"FA4DenseAttentionKernel.CompileKey": object}},
    }


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """What vLLM's Triton kernel does for a cache of the keys' own type."""
    assert kv_cache_dtype == "auto"
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]
