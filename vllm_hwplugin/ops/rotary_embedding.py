# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.rotary_embedding``: rotary position embedding of query and key, in place."""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation


# vLLM's declaration, so that this operation can replace vLLM's.
@operation(kernel=KERNELS["rotary_embedding"], writes=("query", "key"))
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate heads in place, bit for bit like vLLM's ``RotaryEmbedding.forward_static``.

    Each product and sum is rounded to the cache's type; with a float32 cache the result is rounded once.

    Args:
        positions: [tokens], int64, contiguous; rows of the cache. The kernel cannot check their range.
        query: [tokens, heads * head_size] or [tokens, heads, head_size]; float32, float16 or bfloat16. Written.
        key: like query, with its own number of heads, written; None if the layer computes no keys.
        cos_sin_cache: [max_position, rotary_dim], the cosines and then the sines; query's type or float32.
        is_neox: the pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1).
        rope_dim_offset: the first rotated element of a head.
        inverse: rotate back.
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    for tensor in (query,) if key is None else (query, key):
        heads = tensor if tensor.dim() == 3 else tensor.unflatten(-1, (-1, head_size))
        part = heads[..., rope_dim_offset : rope_dim_offset + rotary_dim]
        first, second = part.chunk(2, dim=-1) if is_neox else (part[..., ::2], part[..., 1::2])
        rotated = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated)
