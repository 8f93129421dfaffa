# SPDX-License-Identifier: Apache-2.0
"""The operations that the plugin has no kernel for, in torch.

All of it can be captured: no size and no branch depends on what a tensor holds.
"""

from __future__ import annotations

import torch


def weak_ref_tensor(input: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it.

    vLLM holds the outputs of a captured graph by it. Their memory belongs to the pool of the graph, which stays as long
    as the graph can be replayed; a tensor that owned it would keep the pool from using it again for the next graph.

    Args:
        input: with at least one element.

    Returns:
        A tensor of the same type, shape and strides. It is valid as long as something else keeps the memory.
    """
    last = sum((size - 1) * stride for size, stride in zip(input.shape, input.stride(), strict=True))
    # From the first element of the tensor, which need not be that of its storage.
    storage = torch._C._construct_storage_from_data_pointer(
        input.data_ptr(), input.device, (last + 1) * input.element_size()
    )
    empty = torch.empty(0, dtype=input.dtype, device=input.device)
    return empty.set_(storage, 0, input.shape, input.stride())


def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """``input / rms(input) * weight`` over the last dimension, normalised in float32 and rounded before the weight.

    Args:
        result: input's shape. Written.
        input: [..., width], float32, float16 or bfloat16.
        weight: [width]; or [input.shape[0], width], one row for each of the outermost parts; None for none.
        epsilon: added to the mean square.
    """
    value = input.float()
    value = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)).to(result.dtype)
    if weight is not None:
        rows = weight if weight.dim() == 1 else weight.view(-1, *(1,) * (input.dim() - 2), weight.shape[-1])
        value = value * rows
    result.copy_(value)


def apply_repetition_penalties(
    logits: torch.Tensor, prompt_mask: torch.Tensor, output_mask: torch.Tensor, repetition_penalties: torch.Tensor
) -> None:
    """vLLM's own, for devices other than CUDA."""
    from vllm._custom_ops import apply_repetition_penalties_torch

    apply_repetition_penalties_torch(logits, prompt_mask, output_mask, repetition_penalties)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write keys and values into the paged cache.

    Args:
        key, value: [tokens or more, heads, head_size].
        key_cache, value_cache: [blocks, block_size, heads, head_size], any strides. Written.
        slot_mapping: [tokens], int64; -1 for a token that is not to be written.
        kv_cache_dtype: ``auto``, or the name of an unquantized type, which is then the cache's.

    Raises:
        NotImplementedError: a quantized cache.
    """
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NotImplementedError(
            f"reshape_and_cache_flash in torch has no kv_cache_dtype={kv_cache_dtype}; expected auto, bfloat16 or "
            "float16: choose another --kv-cache-dtype or attention backend"
        )
    tokens, block_size = slot_mapping.shape[0], key_cache.shape[1]
    if tokens == 0:
        return
    written = slot_mapping >= 0
    # A token without a slot writes what the first token with one writes, to the same place; if none has one, what is in
    # slot 0 already.
    first = written.int().argmax().view(1)
    slots = torch.where(written, slot_mapping, slot_mapping[first].clamp(min=0))
    places = (slots // block_size, slots % block_size)
    written = written.view(-1, 1, 1)
    for new, cache in ((key[:tokens], key_cache), (value[:tokens], value_cache)):
        rest = torch.where(written[first], new[first].to(cache.dtype), cache[places[0][first], places[1][first]])
        cache.index_put_(places, torch.where(written, new.to(cache.dtype), rest))
