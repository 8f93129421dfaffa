# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: bit for bit what vLLM computes, in place. tests/gpu has the same calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.rotary_embedding import rotary_embedding  # noqa: E402

from .operation_checks import same_bits  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

# Prints how many elements were rotated of each call, or -1 if a bit is another one.
AGAINST_VLLM = """
import json, torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from tests.ops.test_rotary_embedding import calls
from vllm_hwplugin.ops.rotary_embedding import rotary_embedding

def rotated(given, offset, cache, positions, neox, inverse):
    if offset == 0 and not inverse and cache.dtype == given.dtype:
        size = given.shape[-1]
        flat = given.reshape(len(positions), -1)
        found = RotaryEmbedding.forward_static(positions, flat, None, size, cache.shape[1], cache, neox)
        return found[0].view_as(given)
    cos, sin = cache[positions].chunk(2, dim=-1)
    result = given.clone()
    part = slice(offset, offset + cache.shape[1])
    sin = -sin if inverse else sin
    result[..., part] = ApplyRotaryEmb.forward_static(given[..., part], cos, sin, neox, cache.dtype == torch.float32)
    return result

found = []
for positions, query, key, size, cache, neox, offset, inverse in calls("cpu"):
    tensors = [(tensor, tensor.clone()) for tensor in (query, key) if tensor is not None]
    rotary_embedding(positions, query, key, size, cache, neox, offset, inverse)
    count = 0
    for tensor, before in tensors:
        wanted = rotated(before.unflatten(-1, (-1, size)) if tensor.dim() == 2 else before,
                         offset, cache, positions, neox, inverse).view_as(tensor)
        count = count + int((tensor != before).sum()) if torch.equal(tensor, wanted) else -1 << 40
    found.append(max(count, -1))
print(json.dumps(found))
"""


def calls(device: str) -> Iterator[tuple[Any, ...]]:
    """Arguments of vLLM's shapes: heads with a dimension or without, slices of a larger tensor, without a key."""
    torch.manual_seed(0)
    for dtype, neox, float_cache in [
        (dtype, neox, float_cache)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for neox in (True, False)
        for float_cache in (True, False)
    ]:
        for heads, kv_heads, size, rotary, tokens, offset, inverse in (
            (8, 1, 128, 128, 3, 0, False),
            (32, 0, 64, 64, 33, 0, False),
            (3, 3, 80, 32, 7, 0, False),
            # As DeepSeek V4's layers call it.
            (9, 1, 512, 64, 5, 448, True),
        ):
            angles = torch.arange(256, dtype=torch.float64)[:, None] * 10000.0 ** -(
                torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
            )
            cache = torch.cat([angles.cos(), angles.sin()], -1).to(device, torch.float32 if float_cache else dtype)
            joined = (torch.randn(tokens, (heads + kv_heads) * size, device=device) * 8).to(dtype)
            query, key = joined.split([heads * size, kv_heads * size], -1)
            positions = torch.randint(0, 256, (tokens,), device=device)
            split = key.unflatten(-1, (-1, size)) if kv_heads else None
            yield positions, query, split, size, cache, neox, offset, inverse


@pytest.mark.engine
def test_each_bit_is_vllms() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    assert len(found) == 3 * 2 * 2 * 4
    assert all(count > 0 for count in found)


HEAD = 8
CACHE = torch.cat([torch.arange(48).reshape(12, 4).cos(), torch.arange(48).reshape(12, 4).sin()], dim=-1)


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "positions": torch.arange(5),
        "query": torch.randn(5, 2 * HEAD),
        "key": torch.randn(5, 1, HEAD),
        "head_size": HEAD,
        "cos_sin_cache": CACHE,
        "is_neox": True,
    }
    return {**good, **changes}


def test_the_inverse_rotates_back_and_the_rest_of_a_head_stays() -> None:
    query = torch.randn(5, 2, HEAD)
    before = query.clone()
    for inverse in (False, True):
        rotary_embedding(torch.arange(1, 6), query, None, HEAD, CACHE[:, [0, 1, 4, 5]], False, 3, inverse)
        assert same_bits(query[..., :3], before[..., :3])
        assert same_bits(query[..., 7:], before[..., 7:])
        assert torch.allclose(query, before) is inverse


MISTAKES: list[dict[str, Any]] = [
    {"positions": torch.arange(5, dtype=torch.int32)},
    {"positions": torch.arange(10)[::2]},
    {"positions": torch.arange(4)},
    {"positions": torch.arange(5)[None]},
    {"query": torch.ones(5, 16, dtype=torch.int32)},
    {"query": torch.ones(5, 12)},
    {"query": torch.ones(5, 2, 4)},
    {"query": torch.ones(80)},
    {"query": torch.ones(5, 32)[:, ::2]},
    {"query": torch.ones(1, 16).expand(5, 16)},
    {"key": torch.ones(5, 8).half()},
    {"key": torch.ones(4, 8)},
    {"head_size": 0},
    {"cos_sin_cache": CACHE.half()},
    {"cos_sin_cache": CACHE[0]},
    {"cos_sin_cache": CACHE[:, :7].contiguous()},
    {"cos_sin_cache": CACHE.repeat(1, 2)},
    {"cos_sin_cache": CACHE.repeat(1, 2)[:, ::2]},
    {"rope_dim_offset": 1},
    {"rope_dim_offset": -1},
]
