# SPDX-License-Identifier: Apache-2.0
"""The probe's process on a stand-in for CUDA: ``python -m tests.lab.probe.cuda_standin [JOB ANSWER]...``.

vLLM takes the host for one with compute capability 9.0; its kernels are computed in float64 on the CPU. So all of
vLLM's Python around FLASH_ATTN runs as on such a host, and all of the probe's; a graph is a step that is run again with
the metadata that it was captured with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm.platforms

from tests.attention.paged_standin import paged
from tests.attention.reference import attention


def _flash_attention() -> ModuleType:
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *, out: Any, **given: Any) -> Any:
        if given["alibi_slopes"] is not None:
            raise NotImplementedError("this stand-in has no ALiBi")
        if k.shape[1] % 16:
            raise RuntimeError("this stand-in has pages of a multiple of 16 tokens")
        assert given["fa_version"] == 3
        assert given["max_seqlen_q"] >= int(given["cu_seqlens_q"].diff().max())
        assert given["max_seqlen_k"] >= int(given["seqused_k"].max())
        window = given["window_size"]
        dtype = out.dtype
        found = attention(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            given["cu_seqlens_q"],
            given["seqused_k"],
            given["block_table"],
            softmax_scale=given["softmax_scale"],
            causal=given["causal"],
            window_size=(-1, -1) if window is None else tuple(window),
            softcap=given["softcap"],
            sinks=given["s_aux"],
        )
        tokens = int(given["cu_seqlens_q"][-1])
        out[:tokens] = found[:tokens]
        return out

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.get_scheduler_metadata = lambda **given: torch.zeros(1, dtype=torch.int32)  # type: ignore[attr-defined]
    module.fa_version_unsupported_reason = lambda version: "a stand-in"  # type: ignore[attr-defined]
    module.is_fa_version_supported = lambda version: version in (2, 3)  # type: ignore[attr-defined]
    # What later versions import besides, for FlashAttention 4.
    module.compile_flash_attn_varlen_func_from_specs = None  # type: ignore[attr-defined]
    module.__path__ = []
    return module


def _reshape_and_cache_flash(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, cache_dtype: str, k_scale: Any, v_scale: Any
) -> None:
    assert slots.dtype == torch.int64
    kept = slots >= 0
    block, offset = slots[kept] // key_cache.shape[1], slots[kept] % key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        if cache.element_size() == 1:
            cache.view(torch.float8_e4m3fn)[block, offset] = new[: len(slots)][kept].to(torch.float8_e4m3fn)
        else:
            cache[block, offset] = new[: len(slots)][kept]


def _pretend() -> None:
    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        # Compiled operations of the CUDA build, by the names of either version.
        sys.modules.setdefault(name, ModuleType(name))
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):
        device_type = "cpu"
        device_name = "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, config: Any, num_heads: int | None = None) -> str:
            # As the plugin's platform for CUDA, whose detection needs a GPU.
            from vllm_hwplugin.platforms._cuda_attention import choose

            return choose(
                super().get_attn_backend_cls, selected_backend, config, num_heads, cls.get_device_capability()
            )

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a stand-in"

    vllm.platforms._current_platform = Platform()
    flash = _flash_attention()
    sys.modules["vllm.vllm_flash_attn"] = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"] = flash
    sys.modules["vllm_hwplugin.attention.paged"] = paged()
    from vllm import _custom_ops
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    # It would import layers that ask the compiled operations what the device can.
    _LazyRegisteredModel._save_modelinfo_to_cache = lambda self, *found: None
    _custom_ops.reshape_and_cache_flash = _reshape_and_cache_flash


def main(files: Sequence[str]) -> None:
    _pretend()
    from vllm_hwplugin_lab.probe import Job, _child, _host, _step

    def capture(build: Any, step: Any) -> Any:
        step(build())
        metadata = build()
        step(metadata)
        return lambda: step(metadata)

    can_try = _host.LayerHost.can_try
    _step.capture = capture
    _host.LayerHost.can_try = lambda self, trial: "graph" in trial.settings or can_try(self, trial)
    for job, answer in zip(files[::2], files[1::2], strict=True):
        with Path(answer).open("a", encoding="utf-8") as stream:
            _child.main(Job(**json.loads(Path(job).read_text(encoding="utf-8"))), stream)


if __name__ == "__main__":
    main(sys.argv[1:])
