# SPDX-License-Identifier: Apache-2.0
"""The functions: their arguments as in mate 0.2.2, what they refuse, and which module of kernels a call needs."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _device, _kernels
from .jit import need

_TYPES = (torch.float16, torch.bfloat16)
# Head sizes of queries and keys, and of values, each rounded up to one that there are kernels for.
_SIZES = (64, 128, 192, 256, 384, 512)
_TILE_N = 64


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
    window = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    chosen = backend
    if backend == "auto":
        prebuilt = (
            q.dtype in _TYPES
            and q.dtype == k.dtype == v.dtype
            and q.dim() == k.dim() == v.dim()
            and ((q.shape[-1] == v.shape[-1] and q.shape[-1] <= 128) or (q.shape[-1], v.shape[-1]) == (192, 128))
            and page_table is None
            and seqused_q is None
            and seqused_k is None
            and (window[0] is None or window[0] < 0)
            and (window[1] is None or window[1] <= 0)
            and qv is None
            and softcap == 0.0
            and learnable_sink is None
            and not attention_chunk
            and cp_world_size == 1
        )
        if prebuilt and q.dim() == 3:
            prebuilt = cu_seqlens_q.numel() == cu_seqlens_k.numel()  # type: ignore[union-attr]
            prebuilt = prebuilt and max_seqlen_q is not None and max_seqlen_k is not None
        chosen = "mubin" if prebuilt else "mutlass"
    if chosen == "mubin":
        # Asserted after the choice, and more narrowly than it is made.
        assert seqused_q is None
        assert seqused_k is None
        assert window[0] is None or window[0] < 0
        assert window[1] is None or window[1] < 0
        assert qv is None
        assert learnable_sink is None
        assert softcap == 0.0
        assert not attention_chunk
        assert q.dtype in _TYPES
        assert q.dtype == k.dtype == v.dtype
        assert page_table is None
        _on_device(q, k, v, cu_seqlens_q, cu_seqlens_k)
        need("flash_attention_ops", {})
        config = None
    elif chosen == "mutlass":
        config = {"mubin": False}
    else:
        raise ValueError(f"Only support backend 'mutlass', 'mubin' and 'auto'! Get unknown backend {chosen}!")
    result, lse = _forward(
        q, _last_dense(k), v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
        softmax_scale, causal, window, qv, learnable_sink, attention_chunk, softcap, scheduler_metadata, num_splits,
        pack_gqa, sm_margin, cp_world_size, cp_rank, cp_tot_seqused_k, out, prebuilt=config is None,
    )  # fmt: skip
    return (result, lse) if return_softmax_lse else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | list[int] | None = (-1, -1),
    learnable_sink: torch.Tensor | None = None,
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
) -> Any:
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    asked = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
    if any(argument is not None for argument in asked):
        raise NotImplementedError(
            "the stand-in for mate neither appends keys nor rotates them nor picks rows of a cache"
        )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(k_cache),), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    result, lse = _forward(
        q, k_cache, v_cache, cu_seqlens_q, None, None, cache_seqlens, max_seqlen_q, None, page_table, softmax_scale,
        causal, (-1, -1) if window_size is None else (window_size[0], window_size[1]), qv, learnable_sink,
        attention_chunk, softcap, scheduler_metadata, num_splits, pack_gqa, sm_margin, cp_world_size, cp_rank,
        cp_tot_seqused_k, None, prebuilt=False,
    )  # fmt: skip
    return (result, lse) if return_softmax_lse else result


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    mp_margin: int = 0,
) -> torch.Tensor:
    """A new tensor of 4 * batch_size int32, by a kernel on the current stream: nothing of it is read on the host."""
    for name, tensor, rows in (
        ("cu_seqlens_k", cu_seqlens_k, batch_size + 1),
        ("cu_seqlens_q", cu_seqlens_q, batch_size + 1),
        ("seqused_q", seqused_q, batch_size),
        ("seqused_k", seqused_k, batch_size),
    ):
        assert tensor is None or tensor.shape == (rows,), f"{name} must have shape ({rows},)"
    _lengths_are_int32(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cache_leftpad)
    _on_device(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cache_leftpad)
    assert num_heads_q % num_heads_kv == 0, "num_heads_q must be divisible by num_heads_kv"
    if cu_seqlens_q is None or seqused_q is not None or attention_chunk or cache_leftpad is not None or mp_margin:
        raise NotImplementedError("the stand-in for mate schedules packed queries alone, over the whole device")
    if num_splits < 1:
        raise NotImplementedError("the stand-in for mate has no heuristic for num_splits")
    ratio = num_heads_q // num_heads_kv
    tile_m, packed, _ = _tiles(max_seqlen_q, ratio, headdim, headdim_v or headdim, pack_gqa)
    is_causal, local, left, right = _mask(max_seqlen_q, max_seqlen_k, causal, window_size or (-1, -1))
    need(
        "fmha_get_metadata",
        {
            "cu_seqlens_k": cu_seqlens_k is not None,
            "seqused_k": seqused_k is not None,
            "causal": is_causal,
            "local": local,
            "packed": packed,
            "head_ratio": ratio,
            "num_warps": min(math.ceil(batch_size / 31), 32),
        },
    )
    metadata = torch.empty(4 * batch_size, dtype=torch.int32, device=_device.TYPE)
    _kernels.plan(
        metadata, cu_seqlens_q, cu_seqlens_k, seqused_k, is_causal, local, left, right, num_splits, tile_m, _TILE_N,
        ratio if packed else 1, num_heads_kv if packed else num_heads_q, _device.COMPUTE_UNITS,
    )  # fmt: skip
    return metadata


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    page_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    qv: torch.Tensor | None,
    sink: torch.Tensor | None,
    attention_chunk: int | None,
    softcap: float,
    metadata: torch.Tensor | None,
    num_splits: int,
    pack_gqa: bool | None,
    margin: int,
    cp_world_size: int,
    cp_rank: int,
    cp_tot_seqused_k: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    prebuilt: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert qv is None, "qv parameter is not supported yet"
    if cu_seqlens_q is None or seqused_q is not None:
        raise NotImplementedError("the stand-in for mate takes packed queries alone: cu_seqlens_q without seqused_q")
    assert max_seqlen_q is not None
    batch = len(cu_seqlens_q) - 1
    heads, size = q.shape[-2:]
    kv_heads, size_v = v.shape[-2:]
    pages, page = (len(k), k.shape[1]) if page_table is not None else (0, 1)
    held = page_table.shape[1] * page if page_table is not None else k.shape[-3]
    _on_device(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, sink)
    assert q.dtype in _TYPES, "inputs must be float16 or bfloat16"
    assert q.dtype == k.dtype == v.dtype, "inputs must have the same dtype"
    _lengths_are_int32(cu_seqlens_q, cu_seqlens_k, seqused_k)
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous"
        assert len(page_table) == batch, "batch_size must equal batch_size_k when kv_batch_idx is None"
        assert k.shape == (pages, page, kv_heads, size)
        assert v.shape == (pages, page, kv_heads, size_v)
        assert seqused_k is not None
    elif cu_seqlens_k is not None:
        assert k.shape == (held, kv_heads, size)
        assert v.shape == (held, kv_heads, size_v)
        assert cu_seqlens_k.shape == (batch + 1,), "cu_seqlens_k must have shape (batch_size + 1,)"
    else:
        raise NotImplementedError("the stand-in for mate takes keys that are paged, or packed by cu_seqlens_k")
    assert seqused_k is None or seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
    if sink is not None:
        assert sink.shape == (heads,)
        assert sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16"
        num_splits, metadata = -1, None
    assert heads % kv_heads == 0, "num_head must be divisible by num_head_kv"
    if attention_chunk or margin:
        raise NotImplementedError("the stand-in for mate has no chunks of attention and no margin of compute units")
    assert cp_world_size > 0, "cp_world_size must be positive"
    assert cp_world_size != 1 or cp_rank == 0, "When context parallelism is disabled, cp_rank must be zero"
    assert cp_world_size == 1 or cp_tot_seqused_k is not None, (
        "cp_tot_seqused_k must be provided when context parallelism is enabled."
    )
    is_causal, local, left, right = _mask(max_seqlen_q, held, causal, window)
    assert not (local and cp_world_size > 1), "Local attention (sliding window) is not supported with cp_world_size > 1"
    if cp_world_size > 1:
        raise NotImplementedError("the stand-in for mate has no context parallelism")
    if out is None:
        out = torch.empty(len(q), heads, size_v, dtype=q.dtype, device=q.device)
    assert out.shape == (len(q), heads, size_v)
    assert out.dtype == q.dtype
    assert out.device == q.device
    ratio = heads // kv_heads
    tile_m, packed, sizes = _tiles(max_seqlen_q, ratio, size, size_v, pack_gqa)
    if metadata is not None and not prebuilt:
        assert len(metadata) >= 4 * batch, "metadata buffer is too small"
        if num_splits < 1:
            raise NotImplementedError("the stand-in for mate has no heuristic for num_splits")
        if num_splits > 128:
            raise ValueError("num_split exceeds max supported splits 128")
    if not prebuilt:
        need(
            "fmha_fwd",
            {
                "paged": page_table is not None,
                "page_of_64": page_table is None or page == 64,
                "packed_keys": cu_seqlens_k is not None,
                "seqused_k": seqused_k is not None,
                "softcap": softcap != 0.0,
                "sink": sink is not None,
                "local": local,
                "causal": is_causal,
                "packed": packed,
                "head_ratio": ratio,
                "dtype": str(q.dtype),
                "tile_m": tile_m,
                "sizes": sizes,
                "even_size": sizes[1] == size_v,
                "metadata": metadata is not None,
            },
        )
        if metadata is not None:
            splits = next(most for most in (16, 32, 64, 128) if num_splits <= most)
            need("fmha_fwd_combine", {"dtype": str(q.dtype), "max_splits": splits})
    lse = torch.empty(heads, len(q), dtype=torch.float32, device=q.device)
    _kernels.attend(
        out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, sink, None if prebuilt else metadata,
        size**-0.5 if softmax_scale is None else softmax_scale, is_causal, left, right, softcap, num_splits, tile_m,
        _TILE_N, packed, local, _device.COMPUTE_UNITS, max_seqlen_q,
    )  # fmt: skip
    return out, lse


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


def _mask(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> tuple[bool, bool, int, int]:
    """Whether the mask is causal, whether it is a window, and how far it reaches to both sides."""
    left = -1 if window[0] is None or window[0] >= keys - 1 else window[0]
    right = -1 if window[1] is None or window[1] >= queries - 1 else window[1]
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    local = (left >= 0 or right >= 0) and not is_causal
    return is_causal, local, keys - 1 if left < 0 else left, queries - 1 if right < 0 else right


def _last_dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _lengths_are_int32(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            assert tensor.dtype == torch.int32, "cu_seqlens and seqused must be int32"
            assert tensor.stride(0) == 1, "cu_seqlens and seqused must be contiguous"


def _on_device(*tensors: torch.Tensor | None) -> None:
    device = _device.TYPE
    assert all(tensor is None or tensor.device.type == device for tensor in tensors), (
        f"inputs must be on {device.upper()} device"
    )
