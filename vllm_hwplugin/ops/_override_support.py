# SPDX-License-Identifier: Apache-2.0
"""Which calls of vLLM's operations the plugin's kernels can serve; the others go to vLLM's own kernels.

One function for each operation, of its arguments. They run at every call that is not replayed from a graph, so they
look at types, strides and sizes only, and at as few as tell the difference. Yes means that the kernel's own checks hold
for every call that vLLM's kernel would take; what is wrong for both is left for the kernel to report.
"""

from __future__ import annotations

from typing import Final

import torch

_HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (torch.float32, *_HALVES)

# What merge_attn_states moves at once.
_LOAD_BYTES: Final = 16


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int,
    inverse: bool,
) -> bool:
    dtype = query.dtype
    if dtype not in _FLOATS or positions.dtype is not torch.int64 or not positions.is_contiguous():
        return False
    if cos_sin_cache.dtype is not dtype and cos_sin_cache.dtype is not torch.float32:
        return False
    # Tokens have to be at even distances, which several batches need not be.
    batches = positions.dim() > 1
    return all(
        tensor.dtype is dtype and (tensor.is_contiguous() if batches else tensor.stride(-1) == 1)
        for tensor in ((query,) if key is None else (query, key))
    )


def fused_qk_norm_rope(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
    forced_token_heads_per_warp: int,
) -> bool:
    dtype = qkv.dtype
    return (
        dtype in _HALVES
        and q_weight.dtype is dtype
        and k_weight.dtype is dtype
        and cos_sin_cache.dtype in (dtype, torch.float32)
        and position_ids.dtype is torch.int64
        and all(one.is_contiguous() for one in (qkv, q_weight, k_weight, cos_sin_cache, position_ids))
    )


def merge_attn_states(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None,
    output_scale: torch.Tensor | None,
) -> bool:
    dtype = prefix_output.dtype
    if dtype not in _FLOATS or suffix_output.dtype is not dtype:
        return False
    if output.dtype is not (dtype if output_scale is None else torch.float8_e4m3fn):
        return False
    if any(lse is not None and lse.dtype is not torch.float32 for lse in (prefix_lse, suffix_lse, output_lse)):
        return False
    pack = _LOAD_BYTES // dtype.itemsize
    return all(
        tensor.shape[-1] % pack == 0
        and tensor.stride(-1) == 1
        and tensor.stride(0) % pack == 0
        and tensor.stride(1) % pack == 0
        and tensor.data_ptr() % (pack * tensor.dtype.itemsize) == 0
        for tensor in (output, prefix_output, suffix_output)
    )
