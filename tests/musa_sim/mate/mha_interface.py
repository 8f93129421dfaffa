# SPDX-License-Identifier: Apache-2.0
"""The functions: their arguments as in mate 0.2.2, what they refuse, and which module of kernels a call needs."""

from __future__ import annotations

from typing import Any

import torch

from . import _device, _kernels
from .jit import need

_TYPES = (torch.float16, torch.bfloat16)
# Head sizes of queries and keys, and of values, each rounded up to one that there are kernels for.
_SIZES = (64, 128, 192, 256, 384, 512)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] | list[int] | None = (-1, -1),
    learnable_sink: torch.Tensor | None = None,
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    backend: str = "auto",
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    _refuse(seqused_q is not None, qv is not None, attention_chunk, sm_margin, cp_world_size != 1)
    fp8 = q.dtype == torch.float8_e4m3fn and _device.VERSION >= (0, 2, 7)
    # What else mate takes, the plugin does not give it.
    assert cu_seqlens_q is not None
    if cu_seqlens_k is not None:
        assert page_table is None, "page_table is not supported with cu_seqlens_k"
        _refuse(seqused_k is not None, learnable_sink is not None, softcap, scheduler_metadata is not None, num_splits)
        _refuse(tuple(window_size or (-1, -1)) != (-1, -1))
        found = _packed(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            pack_gqa,
            backend,
            out,
        )
        return found if return_softmax_lse else found[0]
    _refuse(return_softmax_lse, backend != "auto", scheduler_metadata is not None, num_splits not in (0, 1))
    assert page_table is not None
    assert seqused_k is not None
    assert max_seqlen_q is not None
    k = k if k.stride(-1) == 1 else k.contiguous()
    batch = len(cu_seqlens_q) - 1
    heads, size = q.shape[-2:]
    kv_heads, size_v = v.shape[-2:]
    pages, page = k.shape[:2]
    _on_device(q, k, v, cu_seqlens_q, seqused_k, page_table, learnable_sink)
    assert fp8 or q.dtype in _TYPES, "inputs must be float16 or bfloat16"
    assert q.dtype == k.dtype == v.dtype, "inputs must have the same dtype"
    descales = (q_descale, k_descale, v_descale)
    for descale in descales:
        assert (descale is not None) == fp8, "descales are for float8 inputs"
        assert descale is None or descale.shape == (batch, kv_heads), (
            "descale must have shape (batch_size, num_heads_k)"
        )
        assert descale is None or descale.dtype == torch.float32
    _lengths_are_int32(cu_seqlens_q, seqused_k)
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.stride(-1) == 1, "page_table must be contiguous"
    assert len(page_table) == batch, "batch_size must equal batch_size_k when kv_batch_idx is None"
    assert k.shape == (pages, page, kv_heads, size)
    assert v.shape == (pages, page, kv_heads, size_v)
    assert seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
    if learnable_sink is not None:
        assert learnable_sink.shape == (heads,)
        assert learnable_sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16"
    assert heads % kv_heads == 0, "num_head must be divisible by num_head_kv"
    room = page_table.shape[1] * page
    is_causal, local, left, right = _mask(max_seqlen_q, room, causal, window_size or (-1, -1))
    if out is None:
        out = torch.empty(len(q), heads, size_v, dtype=torch.bfloat16 if fp8 else q.dtype, device=q.device)
    assert out.shape == (len(q), heads, size_v)
    assert out.dtype in _TYPES if fp8 else out.dtype == q.dtype
    assert out.device == q.device
    ratio = heads // kv_heads
    tile_m, packed, sizes = _tiles(max_seqlen_q, ratio, size, size_v, pack_gqa)
    need(
        "fmha_fwd",
        {
            "page_of_64": page == 64,
            "softcap": softcap != 0.0,
            "sink": learnable_sink is not None,
            "local": local,
            "causal": is_causal,
            "packed": packed,
            "head_ratio": ratio,
            "dtype": str(q.dtype),
            "tile_m": tile_m,
            "sizes": sizes,
            "even_size": sizes[1] == size_v,
        },
    )
    _kernels.attend(
        out, q, k, v, cu_seqlens_q, seqused_k, page_table, learnable_sink,
        size**-0.5 if softmax_scale is None else softmax_scale, is_causal, left, right, softcap, local, max_seqlen_q,
        *descales,
    )  # fmt: skip
    return out


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    pack_gqa: bool | None,
    backend: str,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of one request behind the other, without a cache: the result, and the log-sum-exp, (heads, queries)."""
    assert max_seqlen_q is not None
    heads, size = q.shape[-2:]
    kv_heads, size_v = v.shape[-2:]
    _on_device(q, k, v, cu_seqlens_q, cu_seqlens_k)
    assert q.dtype in _TYPES, "inputs must be float16 or bfloat16"
    assert q.dtype == k.dtype == v.dtype, "inputs must have the same dtype"
    _lengths_are_int32(cu_seqlens_q, cu_seqlens_k)
    assert k.shape == (len(k), kv_heads, size)
    assert v.shape == (len(k), kv_heads, size_v)
    assert cu_seqlens_k.shape == cu_seqlens_q.shape, "cu_seqlens_k must have shape (batch_size + 1,)"
    assert heads % kv_heads == 0, "num_head must be divisible by num_head_kv"
    # Kernels that come built have these heads alone.
    built = (size, size_v) == (192, 128) or size == size_v <= 128
    backend = ("mubin" if built and max_seqlen_k is not None else "mutlass") if backend == "auto" else backend
    if out is None:
        out = torch.empty(len(q), heads, size_v, dtype=q.dtype, device=q.device)
    assert out.shape == (len(q), heads, size_v)
    assert out.dtype == q.dtype
    assert out.device == q.device
    if backend == "mubin":
        assert built, "HeadDim unsupported"
        assert max_seqlen_k is not None
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "must have contiguous last dimension"
        assert out.is_contiguous()
        assert max_seqlen_q > 0
        assert max_seqlen_k > 0
        need("flash_attention_ops", {})
    else:
        assert backend == "mutlass", f"Get unknown backend {backend}!"
        tile_m, packed, sizes = _tiles(max_seqlen_q, heads // kv_heads, size, size_v, pack_gqa)
        need(
            "fmha_fwd",
            {
                "causal": causal,
                "packed": packed,
                "dtype": str(q.dtype),
                "tile_m": tile_m,
                "sizes": sizes,
                "paged": False,
            },
        )
    lse = torch.empty(heads, len(q), dtype=torch.float32, device=q.device)
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    longest_k = len(k) if max_seqlen_k is None else max_seqlen_k
    _kernels.attend_packed(
        out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, max_seqlen_q, longest_k, backend == "mubin"
    )
    return out, lse


def _refuse(*asked: Any) -> None:
    """What the plugin never asks for is not imitated."""
    if any(asked):
        raise NotImplementedError(
            "the stand-in for mate takes packed queries without schedules, and none of mate's other arguments"
        )


def _tiles(
    queries: int, ratio: int, size: int, size_v: int, pack_gqa: bool | None
) -> tuple[int, bool, tuple[int, int]]:
    """Rows of a tile, whether the query heads of a KV head are rows of one, and the head sizes of the kernel."""
    sizes = (_rounded(size), _rounded(size_v))
    packed = queries * ratio <= 256 if pack_gqa is None else pack_gqa
    rows = queries * ratio if packed else queries
    tile_m = next((most for most in (32, 64, 128, 192) if rows <= most), 256)
    if sizes == (256, 256):
        tile_m = 32 if packed else 192
    elif sizes == (384, 384):
        tile_m = 64
    elif sizes == (512, 512):
        tile_m = 32
    else:
        assert sizes[0] == sizes[1] or sizes == (192, 128), f"Add config for headdim {sizes[0]}-{sizes[1]}"
    return tile_m, packed, sizes


def _rounded(size: int) -> int:
    assert size <= _SIZES[-1], f"no kernels for a head of {size}"
    return next(most for most in _SIZES if size <= most)


def _mask(queries: int, keys: int, causal: bool, window: Any) -> tuple[bool, bool, int, int]:
    """Whether the mask is causal, whether it is a window, and how far it reaches to both sides."""
    left = -1 if window[0] is None or window[0] >= keys - 1 else window[0]
    right = -1 if window[1] is None or window[1] >= queries - 1 else window[1]
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    local = (left >= 0 or right >= 0) and not is_causal
    return is_causal, local, keys - 1 if left < 0 else left, queries - 1 if right < 0 else right


def _lengths_are_int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32, "cu_seqlens and seqused must be int32"
        assert tensor.stride(0) == 1, "cu_seqlens and seqused must be contiguous"


def _on_device(*tensors: torch.Tensor | None) -> None:
    device = _device.TYPE
    assert all(tensor is None or tensor.device.type == device for tensor in tensors), (
        f"inputs must be on {device.upper()} device"
    )
