# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.rotary_embedding``: rotary position embedding of query and key, in place.

The reference below serves every device, until the kernel of ``csrc/rotary_embedding`` is loaded and takes over CUDA.
Importing this module defines the operation and builds nothing.
"""

from __future__ import annotations

from typing import Final

import torch

from ._define import define
from .build.jit import GPUS, ensure
from .build.spec import ROTARY_EMBEDDING

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)

# As vLLM declares its own operation of this name, so that this one can stand in its place.
_SCHEMA: Final = (
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)


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
    if query.device.type in GPUS and not torch.compiler.is_compiling():
        ensure(ROTARY_EMBEDDING)
    torch.ops.hwplugin.rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse
    )


def _reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    _check(positions, query, key, head_size, cos_sin_cache, rope_dim_offset)
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


def _check(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    rope_dim_offset: int,
) -> None:
    """The kernel's own checks, so that a mistake shows on any device."""

    def expect(good: bool, text: str) -> None:
        if not good:
            raise RuntimeError(f"rotary_embedding: {text}")

    expect(positions.dtype == torch.int64, f"positions is {positions.dtype}; expected torch.int64")
    expect(positions.dim() >= 1 and positions.is_contiguous(), "positions has to be contiguous and to have a dimension")
    expect(query.dtype in _DTYPES, f"query is {query.dtype}; expected float32, float16 or bfloat16")
    expect(head_size > 0, f"head_size is {head_size}; expected a positive number")
    expect(cos_sin_cache.dim() == 2, f"cos_sin_cache has {cos_sin_cache.dim()} dimensions; expected 2")
    rotary_dim = cos_sin_cache.shape[1]
    expect(
        rotary_dim % 2 == 0 and rotary_dim <= head_size,
        f"rotary_dim is {rotary_dim}; expected an even number of at most head_size={head_size}",
    )
    expect(
        0 <= rope_dim_offset <= head_size - rotary_dim,
        f"rope_dim_offset is {rope_dim_offset}; expected 0 to head_size - rotary_dim, {head_size - rotary_dim}",
    )
    for name, tensor in (("positions", positions), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        if tensor is None:
            continue
        expect(tensor.device == query.device, f"{name} is on {tensor.device}; expected query's device, {query.device}")
    if key is not None:
        expect(key.dtype == query.dtype, f"key is {key.dtype}; expected query's type, {query.dtype}")
    expect(
        cos_sin_cache.dtype in (query.dtype, torch.float32),
        f"cos_sin_cache is {cos_sin_cache.dtype}; expected query's type, {query.dtype}, or torch.float32",
    )
    expect(rotary_dim == 0 or cos_sin_cache.stride(1) == 1, "cos_sin_cache needs stride 1 in its last dimension")
    for name, tensor in (("query", query), ("key", key)):
        if tensor is None:
            continue
        leading = positions.dim()
        expect(
            tensor.shape[:leading] == positions.shape and tensor.dim() - leading in (1, 2),
            f"{name} has shape {tuple(tensor.shape)}; expected {tuple(positions.shape)} and then "
            "[heads * head_size] or [heads, head_size]",
        )
        last = tensor.shape[-1]
        expect(
            last == head_size if tensor.dim() == leading + 2 else last % head_size == 0,
            f"{name} has {last} elements in its last dimension; expected head_size={head_size}, or a multiple of it "
            "where the heads have no dimension of their own",
        )
        expect(
            all(stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1),
            f"{name} has a stride of 0, so its elements overlap; expected a tensor that can be written in place",
        )
        expect(last <= 1 or tensor.stride(-1) == 1, f"{name} needs stride 1 in its last dimension: call contiguous()")


_LIBRARY: Final = define(_SCHEMA, _reference)
