# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: bit for bit what vLLM computes, in place, in every layout; and clear errors."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.rotary_embedding import rotary_embedding  # noqa: E402

from .vllm_child import printed_beside_vllm  # noqa: E402

# Against vLLM itself, in a process of its own that no patch and no test touches. Prints the cases and how many elements
# were rotated at all, so that a comparison of nothing with nothing cannot pass.
AGAINST_VLLM = """
import itertools, json, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm_hwplugin.ops.rotary_embedding import rotary_embedding

# Heads of query and key, head size, rotated elements, tokens: drafters and targets as tensor parallelism leaves them.
SHAPES = [(8, 1, 128, 128, 3), (6, 1, 128, 64, 6), (4, 1, 128, 128, 4), (16, 2, 128, 128, 16), (8, 1, 128, 128, 1),
          (8, 1, 128, 128, 2), (32, 8, 64, 64, 33), (3, 3, 80, 32, 7), (1, 1, 256, 256, 512)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
found = []
for shape, dtype, neox, keyed in itertools.product(SHAPES, DTYPES, [True, False], [True, False]):
    heads, kv_heads, head_size, rotary_dim, tokens = shape
    torch.manual_seed(tokens)
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(head_size, rotary_dim, 4096, 10000.0, neox, dtype, init_cache=False)
    full = layer._compute_cos_sin_cache()
    cache = full.to(dtype)
    positions = torch.randint(0, 4096, (tokens,))
    query = torch.randn(tokens, heads * head_size, dtype=dtype) * 8
    key = torch.randn(tokens, kv_heads * head_size, dtype=dtype) * 8 if keyed else None
    expected = RotaryEmbedding.forward_static(positions, query, key, head_size, rotary_dim, cache, neox)
    before = query.clone()
    rotary_embedding(positions, query, key, head_size, cache, neox)
    same = torch.equal(query, expected[0]) and (key is None or torch.equal(key, expected[1]))
    found.append([same, int((query != before).sum())])

    # A float32 cache, the last elements of each head, backwards: what vLLM's DeepSeek V4 layers ask for.
    offset = head_size - rotary_dim
    query = before.clone().view(tokens, heads, head_size)
    cos, sin = full[positions].chunk(2, dim=-1)
    expected = query.clone()
    expected[..., offset:] = ApplyRotaryEmb.forward_static(query[..., offset:], cos, -sin, neox, True)
    rotary_embedding(positions, query, None, head_size, full, neox, offset, True)
    found.append([torch.equal(query, expected), int((query != before.view_as(query)).sum())])
print(json.dumps(found))
"""

SCHEMAS = """
import json, torch
from vllm.platforms import current_platform
import vllm_hwplugin.ops.rotary_embedding
current_platform.import_kernels()
print(json.dumps([str(getattr(torch.ops, name).rotary_embedding.default._schema) for name in ("_C", "hwplugin")]))
"""


@pytest.mark.slow
def test_every_shape_type_and_style_is_bit_for_bit_what_vllm_computes() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    assert len(found) == 9 * 3 * 2 * 2 * 2
    assert [index for index, (same, rotated) in enumerate(found) if not same or rotated == 0] == []


def test_the_schema_is_that_of_vllms_own_operation() -> None:
    theirs, ours = printed_beside_vllm(SCHEMAS)
    assert theirs.startswith("_C::rotary_embedding(")
    assert ours == theirs.replace("_C::", "hwplugin::", 1)


HEAD = 8
CACHE = torch.cat([torch.arange(48).reshape(12, 4).cos(), torch.arange(48).reshape(12, 4).sin()], dim=-1)


def _expected(positions: Any, heads: Any, neox: bool) -> Any:
    """One element at a time, in double precision."""
    result = heads.double().clone()
    for where in torch.cartesian_prod(*(torch.arange(size) for size in heads.shape[:-1])).tolist():
        cos, sin = CACHE[positions[tuple(where[:-1])]].double().chunk(2)
        for pair in range(4):
            first, second = (pair, pair + 4) if neox else (2 * pair, 2 * pair + 1)
            x, y = heads[tuple(where)].double()[[first, second]]
            result[(*where, first)] = x * cos[pair] - y * sin[pair]
            result[(*where, second)] = y * cos[pair] + x * sin[pair]
    return result


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_it_agrees_with_the_definition_and_writes_in_place(neox: bool, leading: tuple[int, ...]) -> None:
    positions = torch.randint(0, 12, leading)
    query, key = torch.randn(*leading, 3, HEAD), torch.randn(*leading, 1, HEAD)
    expected = _expected(positions, query, neox), _expected(positions, key, neox)
    rotary_embedding(positions, query, key, HEAD, CACHE, neox)
    torch.testing.assert_close(query.double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(key.double(), expected[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("neox", [True, False])
def test_a_slice_of_a_larger_tensor_is_rotated_and_nothing_beside_it(neox: bool) -> None:
    positions = torch.arange(5)
    qkv = torch.randn(5, 6 * HEAD)
    whole = qkv.clone()
    query, key = qkv[:, : 3 * HEAD], qkv[:, 3 * HEAD : 4 * HEAD]
    copies = query.clone(), key.clone()
    rotary_embedding(positions, *copies, HEAD, CACHE, neox)
    rotary_embedding(positions, query, key, HEAD, CACHE, neox)
    assert torch.equal(query, copies[0])
    assert torch.equal(key, copies[1])
    assert torch.equal(qkv[:, 4 * HEAD :], whole[:, 4 * HEAD :])
    assert not torch.equal(query, whole[:, : 3 * HEAD])
    # Heads before tokens in memory.
    swapped = whole[:, : 3 * HEAD].reshape(5, 3, HEAD).transpose(0, 1).contiguous().transpose(0, 1)
    rotary_embedding(positions, swapped, None, HEAD, CACHE, neox)
    assert torch.equal(swapped.reshape(5, -1), copies[0])


def test_elements_beyond_the_rotated_ones_stay_as_they_are() -> None:
    query = torch.randn(5, 2, 12)
    before = query.clone()
    rotary_embedding(torch.arange(5), query, None, 12, CACHE, True)
    assert torch.equal(query[..., 8:], before[..., 8:])
    assert not torch.equal(query[1:, :, :8], before[1:, :, :8])


def test_the_inverse_turns_back_what_lies_at_the_offset() -> None:
    query = torch.randn(5, 2, 12)
    before = query.clone()
    rotary_embedding(torch.arange(5), query, None, 12, CACHE, True, 3)
    assert torch.equal(query[..., :3], before[..., :3])
    assert torch.equal(query[..., 11:], before[..., 11:])
    shifted = before[..., 3:11].clone()
    rotary_embedding(torch.arange(5), shifted, None, 8, CACHE, True)
    assert torch.equal(query[..., 3:11], shifted)
    rotary_embedding(torch.arange(5), query, None, 12, CACHE, True, 3, True)
    torch.testing.assert_close(query, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "heads", "rotary_dim"), [(0, 2, 8), (5, 0, 8), (5, 2, 0)])
def test_nothing_to_rotate_is_no_error(tokens: int, heads: int, rotary_dim: int) -> None:
    query = torch.randn(tokens, heads * HEAD)
    before = query.clone()
    rotary_embedding(torch.zeros(tokens, dtype=torch.int64), query, query.clone(), HEAD, CACHE[:, :rotary_dim], True)
    assert torch.equal(query, before)


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "positions": torch.arange(5),
        "query": torch.randn(5, 2 * HEAD),
        "key": torch.randn(5, HEAD),
        "head_size": HEAD,
        "cos_sin_cache": CACHE,
        "is_neox": True,
    }
    return {**good, **changes}


MISTAKES: list[dict[str, Any]] = [
    {"positions": torch.arange(5, dtype=torch.int32)},
    {"positions": torch.arange(10)[::2]},
    {"positions": torch.arange(4)},
    {"positions": torch.tensor(1)},
    {"query": torch.ones(5, 16, dtype=torch.int32)},
    {"key": torch.ones(5, 8, dtype=torch.float16)},
    {"key": torch.ones(5, 12)},
    {"query": torch.ones(5, 2, 4)},
    {"query": torch.ones(5, 32)[:, ::2]},
    {"query": torch.ones(1, 16).expand(5, 16)},
    {"head_size": 0},
    {"cos_sin_cache": CACHE.double()},
    {"rope_dim_offset": 1},
    {"rope_dim_offset": -1},
    {"cos_sin_cache": CACHE[:, :7]},
    {"cos_sin_cache": CACHE.repeat(1, 2)},
    {"cos_sin_cache": CACHE[0]},
    {"cos_sin_cache": CACHE.t().contiguous().t()},
]
