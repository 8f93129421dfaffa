# SPDX-License-Identifier: Apache-2.0
"""Which calls of vLLM's operations the plugin's kernels can serve; the others go to vLLM's own kernels.

Each operation has one function, of the arguments that it looks at. It runs at every call that is not replayed from a
graph. So it looks only at types, strides and sizes, and at as few as tell the difference. Yes means that the kernel's
own checks hold for every call that vLLM's kernel would take; the kernel reports what is wrong for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (torch.float32, *_HALVES)
_INDICES: Final = (torch.int32, torch.uint32, torch.int64)
_QUANTISED: Final = (torch.float8_e4m3fn, torch.int8)

_GROUP_SIZES: Final = (64, 128)

# What merge_attn_states moves at once.
_LOAD_BYTES: Final = 16


def predicate(name: str, parameters: Sequence[str]) -> Callable[[tuple[Any, ...]], bool]:
    """What says of a call of an operation, from all its arguments in order, whether the plugin's kernel can serve it.

    Args:
        parameters: the operation's, by name.
    """
    looks: Callable[..., bool] = globals()[name]
    places = [parameters.index(parameter) for parameter in inspect.signature(looks).parameters]

    def supports(args: tuple[Any, ...]) -> bool:
        return looks(*map(args.__getitem__, places))

    return supports


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> bool:
    dtype = query.dtype
    if dtype not in _FLOATS or positions.dtype is not torch.int64 or not positions.is_contiguous():
        return False
    if cos_sin_cache.dtype is not dtype and cos_sin_cache.dtype is not torch.float32:
        return False
    if cos_sin_cache.stride(-1) != 1:
        return False
    return _are_heads(query, positions, head_size) and (
        key is None or (key.dtype is dtype and _are_heads(key, positions, head_size))
    )


def _are_heads(tensor: torch.Tensor, positions: torch.Tensor, head_size: int) -> bool:
    """Whether it is positions' shape and then [heads * head_size] or [heads, head_size], at even distances."""
    batches = positions.dim()
    own, last = tensor.dim() - batches, tensor.shape[-1]
    if tensor.shape[:batches] != positions.shape or tensor.stride(-1) != 1 or 0 in tensor.stride():
        return False
    # Those of several batches need not be even.
    if batches > 1 and not tensor.is_contiguous():
        return False
    return bool(last == head_size if own == 2 else own == 1 and last % head_size == 0)


def fused_qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    position_ids: torch.Tensor,
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
    output_scale: torch.Tensor | None,
) -> bool:
    dtype = prefix_output.dtype
    if dtype not in _FLOATS or suffix_output.dtype is not dtype:
        return False
    if output.dtype is not (dtype if output_scale is None else torch.float8_e4m3fn):
        return False
    if any(lse is not None and lse.dtype is not torch.float32 for lse in (prefix_lse, suffix_lse, output_lse)):
        return False
    if output.dim() != 3 or not output.shape == prefix_output.shape == suffix_output.shape:
        return False
    tokens, heads, _ = output.shape
    if any(lse is not None and lse.shape != (heads, tokens) for lse in (prefix_lse, suffix_lse, output_lse)):
        return False
    # Elements of a result must not share memory.
    if 0 in output.stride() or (output_lse is not None and 0 in output_lse.stride()):
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


def silu_and_mul_per_block_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    is_scale_transposed: bool,
) -> bool:
    if input.dtype not in _HALVES or out.dtype not in _QUANTISED or scales.dtype is not torch.float32:
        return False
    if input.dim() != 2 or out.dim() != 2 or input.stride(1) != 1 or not out.is_contiguous():
        return False
    if group_size not in _GROUP_SIZES or input.shape[0] != out.shape[0]:
        return False
    if scales.shape != (out.shape[0], out.shape[1] // group_size):
        return False
    inner, outer = (0, 1) if is_scale_transposed else (1, 0)
    return bool(scales.stride(inner) == 1 and scales.stride(outer) >= scales.shape[inner])


def rms_norm_dynamic_per_token_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None,
) -> bool:
    dtype = input.dtype
    if dtype not in _FLOATS or weight.dtype is not dtype or result.dtype not in _QUANTISED:
        return False
    if scale.dtype is not torch.float32 or not scale.is_contiguous() or not result.is_contiguous():
        return False
    if result.shape != input.shape or scale.numel() * input.shape[-1] != input.numel():
        return False
    if residual is not None and (
        residual.dtype is not dtype or residual.shape != input.shape or not residual.is_contiguous()
    ):
        return False
    return bool(weight.is_contiguous() and (input.is_contiguous() or (input.dim() == 2 and input.stride(1) == 1)))


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> bool:
    if gating_output.dtype not in _FLOATS or gating_output.dim() != 2 or gating_output.stride(1) != 1:
        return False
    tokens, experts = gating_output.shape
    if topk_weights.dtype is not torch.float32 or topk_weights.dim() != 2 or topk_weights.shape[0] != tokens:
        return False
    if not topk_weights.shape == topk_indices.shape == token_expert_indices.shape:
        return False
    if topk_indices.dtype not in _INDICES or token_expert_indices.dtype is not torch.int32:
        return False
    if not (topk_weights.is_contiguous() and topk_indices.is_contiguous() and token_expert_indices.is_contiguous()):
        return False
    if bias is not None and (bias.dtype is not torch.float32 or bias.shape != (experts,) or not bias.is_contiguous()):
        return False
    return is_padding is None or (
        is_padding.dtype is torch.bool and is_padding.shape == (tokens,) and is_padding.is_contiguous()
    )
