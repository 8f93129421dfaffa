# SPDX-License-Identifier: Apache-2.0
"""Decodes of MLA: arguments as in mate 0.2.2, and what its Python and C++ refuse."""

from __future__ import annotations

from typing import Any

import torch

from . import _device, _kernels
from .jit import need

_LATENT, _ROTARY, _PAGE = 512, 64, 64
# Rows of a tile, where a row is a token of a head.
_TILE = 128


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    extra_topk: int | None = None,
    q: torch.Tensor | None = None,
    bs: int | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two new tensors, by a kernel on the current stream: (parts, 8) and (requests + 1,), int32."""
    _refuse(topk, extra_topk, q is not None, bs, topk_length is not None, extra_topk_length is not None)
    assert cache_seqlens is not None, "seqlens_k must be provided when topk is not provided"
    assert not is_fp8_kvcache, "Dense FP8 MLA is not supported on MP31"
    _int32(cache_seqlens)
    need("mla_ops", {})
    parts = torch.empty(_parts(num_q_tokens_per_head_k, num_heads_k), 8, dtype=torch.int32, device=cache_seqlens.device)
    num_splits = torch.empty(len(cache_seqlens) + 1, dtype=torch.int32, device=cache_seqlens.device)
    _kernels.plan_latent(parts, num_splits, cache_seqlens)
    return parts, num_splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the log-sum-exp: (requests, tokens, heads), whatever mate's own text says of its shape."""
    _refuse(
        indices is not None, attn_sink is not None, extra_k_cache is not None, extra_indices_in_kvcache is not None,
        topk_length is not None, extra_topk_length is not None, is_fp8_kvcache,
    )  # fmt: skip
    assert head_dim_v == _LATENT
    requests, tokens, heads, size = q.shape
    assert size == _LATENT + _ROTARY, "head dim latent only supports 512, and head dim rope only 64"
    assert q.dtype in (torch.float16, torch.bfloat16), "mla only supports fp16 and bf16"
    assert k_cache.dtype == q.dtype, "input tensor dtypes must match"
    assert k_cache.shape[1] == _PAGE, "page size only supports 64"
    assert k_cache.shape == (len(k_cache), _PAGE, 1, size)
    assert k_cache.stride(-1) == 1, "ckv must have contiguous last dimension"
    if heads == 128:
        assert k_cache.stride(0) % size == 0
        assert k_cache.stride(1) % size == 0
    assert q.device.type == k_cache.device.type == _device.TYPE
    _int32(cache_seqlens, tile_scheduler_metadata, num_splits)
    assert cache_seqlens.shape == (requests,)
    assert block_table.dtype == torch.int32
    assert block_table.device.type == _device.TYPE
    assert block_table.shape == (requests, block_table.shape[1])
    assert block_table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert num_splits.shape == (requests + 1,)
    # The real one takes any number of parts.
    assert tile_scheduler_metadata.shape == (_parts(tokens * heads, 1), 8)
    need("mla_ops", {})
    out = torch.empty(requests, tokens, heads, _LATENT, dtype=q.dtype, device=q.device)
    lse = torch.empty(requests, tokens, heads, dtype=torch.float32, device=q.device)
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    _kernels.attend_latent(
        out, lse, q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits, scale, causal
    )
    return out, lse


def _parts(rows: int, kv_heads: int) -> int:
    return max(_device.COMPUTE_UNITS // kv_heads // -(-rows // _TILE), 1)


def _refuse(*asked: Any) -> None:
    """What the plugin never asks for is not imitated."""
    if any(asked):
        raise NotImplementedError("the stand-in for mate has dense MLA over an unquantized cache alone")


def _int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.device.type == _device.TYPE
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
