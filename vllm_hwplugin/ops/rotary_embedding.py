# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.rotary_embedding``: rotary position embedding of query and key, in place.

The reference below serves every device, until the kernel of ``csrc/rotary_embedding`` is loaded and takes over CUDA.
Importing this module defines the operation and builds nothing.
"""

from __future__ import annotations

import torch

from ._arguments import Checks
from ._define import operation
from .compile.spec import ROTARY_EMBEDDING


# As vLLM declares its own operation of this name, so that this one can stand in its place.
@operation(kernel=ROTARY_EMBEDDING, writes=("query", "key"))
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
    """Rotate ``rotary_dim`` elements of each head, in place; the others stay as they are.

    The arithmetic is that of the cache's type: each product and sum is rounded to it. With a cache of query's type this
    is vLLM's ``RotaryEmbedding.forward_static``, bit for bit; with a float32 cache the result is rounded once.

    The first call for a CUDA tensor loads the kernel, which may run a compiler: make it before graphs are captured.

    Args:
        positions: [tokens] or [batch, tokens], int64, contiguous; rows of the cache. The kernel cannot check that they
            are inside it.
        query: positions' shape and then [heads * head_size] or [heads, head_size]; float32, float16 or bfloat16. It may
            be a slice of a larger tensor, if the elements of a head lie side by side.
        key: like query, with its own number of heads; None where a layer has no keys of its own.
        head_size: elements of a head.
        cos_sin_cache: [max_position, rotary_dim], the cosines and then the sines; query's type or float32.
        is_neox: the pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1).
        rope_dim_offset: the first rotated element of a head.
        inverse: rotate back.

    Raises:
        RuntimeError: a type, device, shape or stride is not as described.
    """
    checks = Checks("rotary_embedding", "query", query)
    checks.dtype("positions", positions, torch.int64)
    checks.that(
        positions.dim() >= 1 and positions.is_contiguous(), "positions has to be contiguous and to have a dimension"
    )
    checks.floats()
    checks.that(head_size > 0, f"head_size is {head_size}; expected a positive number")
    checks.that(cos_sin_cache.dim() == 2, f"cos_sin_cache has {cos_sin_cache.dim()} dimensions; expected 2")
    rotary_dim = cos_sin_cache.shape[1]
    checks.that(
        rotary_dim % 2 == 0 and rotary_dim <= head_size,
        f"rotary_dim is {rotary_dim}; expected an even number of at most head_size={head_size}",
    )
    checks.that(
        0 <= rope_dim_offset <= head_size - rotary_dim,
        f"rope_dim_offset is {rope_dim_offset}; expected 0 to head_size - rotary_dim, {head_size - rotary_dim}",
    )
    for name, tensor in (("positions", positions), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        checks.device(name, tensor)
    if key is not None:
        checks.dtype("key", key, query.dtype, words=f"query's type, {query.dtype}")
    checks.dtype(
        "cos_sin_cache",
        cos_sin_cache,
        query.dtype,
        torch.float32,
        words=f"query's type, {query.dtype}, or torch.float32",
    )
    checks.last_stride("cos_sin_cache", cos_sin_cache)
    _check_heads(checks, "query", query, positions, head_size)
    if key is not None:
        _check_heads(checks, "key", key, positions, head_size)
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
    cos, sin = (part.unflatten(0, positions.shape).unsqueeze(-2) for part in (cos, sin))
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor if tensor.dim() == positions.dim() + 2 else tensor.unflatten(-1, (-1, head_size))
            part = heads[..., rope_dim_offset : rope_dim_offset + cos_sin_cache.shape[1]]
            _rotate(part, cos, -sin if inverse else sin, is_neox)


def _rotate(part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> None:
    first, second = part.chunk(2, dim=-1) if is_neox else (part[..., ::2], part[..., 1::2])
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)


def _check_heads(checks: Checks, name: str, tensor: torch.Tensor, positions: torch.Tensor, head_size: int) -> None:
    leading = positions.dim()
    checks.that(
        tensor.shape[:leading] == positions.shape and tensor.dim() - leading in (1, 2),
        f"{name} has shape {tuple(tensor.shape)}; expected {tuple(positions.shape)} and then "
        "[heads * head_size] or [heads, head_size]",
    )
    last = tensor.shape[-1]
    checks.that(
        last == head_size if tensor.dim() == leading + 2 else last % head_size == 0,
        f"{name} has {last} elements in its last dimension; expected head_size={head_size}, or a multiple of it "
        "where the heads have no dimension of their own",
    )
    checks.written(name, tensor, " in place")
    checks.last_stride(name, tensor)
