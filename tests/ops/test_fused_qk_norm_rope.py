# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: what vLLM's norm and rotary embedding compute, in place, and clear errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.fused_qk_norm_rope import fused_qk_norm_rope  # noqa: E402

from .operation_checks import arguments_of_vllms_call  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

# vLLM's own layers, one after the other in float32, against the operation in float16 and bfloat16: prints the largest
# difference in units of the last place of the result, which 0.5 bounds where nothing but the last rounding is lost.
AGAINST_VLLM = """
import itertools, json, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm_hwplugin.ops.fused_qk_norm_rope import fused_qk_norm_rope

# Heads of query, key and value, head size, rotated elements, tokens.
SHAPES = [(8, 1, 1, 128, 128, 7), (32, 8, 8, 64, 32, 5), (2, 2, 2, 256, 256, 3), (3, 1, 1, 80, 20, 4)]
found = []
for shape, dtype, neox, own in itertools.product(
    SHAPES, [torch.float16, torch.bfloat16], [True, False], [True, False]
):
    heads, kv_heads, v_heads, head_dim, rotary_dim, tokens = shape
    torch.manual_seed(tokens)
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(head_dim, rotary_dim, 512, 10000.0, neox, torch.float32)
        norms = RMSNorm(head_dim, eps=1e-6), RMSNorm(head_dim, eps=1e-6)
    cache = rope.cos_sin_cache.to(dtype) if own else rope.cos_sin_cache
    positions = torch.randint(0, 512, (tokens,))
    qkv = (torch.randn(tokens, (heads + kv_heads + v_heads) * head_dim) * 8).to(dtype)
    weights = [torch.rand(head_dim).to(dtype) + 0.5 for _ in norms]
    sizes = [heads * head_dim, kv_heads * head_dim, v_heads * head_dim]
    normed = []
    for part, norm, weight in zip(qkv.float().split(sizes, dim=-1), norms, weights):
        norm.weight.data = weight.float()
        normed.append(norm.forward_native(part.reshape(tokens, -1, head_dim)).reshape(tokens, -1))
    expected = RotaryEmbedding.forward_static(positions, *normed, head_dim, rotary_dim, cache.float(), neox)
    value = qkv.split(sizes, dim=-1)[2].clone()
    fused_qk_norm_rope(qkv, heads, kv_heads, v_heads, head_dim, 1e-6, *weights, cache, neox, positions)
    query, key, kept = qkv.split(sizes, dim=-1)
    worst = 0.0
    for got, wanted in zip((query, key), expected):
        # One unit at the size of the head's largest element: where a pair cancels, float32 itself is not exact.
        digits = 8 if dtype == torch.bfloat16 else 11
        unit = torch.ldexp(torch.tensor(1.0), torch.frexp(wanted.abs()).exponent - digits)
        slack = wanted.abs().amax() * 2.0**-21
        worst = max(worst, float((((got.float() - wanted).abs() - slack) / unit).max()))
    found.append([worst, torch.equal(kept, value), float(query.float().abs().max())])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_shape_type_and_style_is_what_vllms_layers_compute() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    assert len(found) == 4 * 2 * 2 * 2
    assert [index for index, (worst, kept, largest) in enumerate(found) if worst > 0.5 or not kept or largest < 1] == []


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0", "0.33.0"])
def test_vllm_calls_its_own_operation_with_the_same_arguments(vllm_tree: Callable[[str], Any], version: str) -> None:
    custom_ops = vllm_tree(version).read("vllm/_custom_ops.py")
    called_with = arguments_of_vllms_call(custom_ops, "fused_qk_norm_rope")
    schema = torch.ops.hwplugin.fused_qk_norm_rope.default._schema
    assert called_with == [argument.name for argument in schema.arguments]


DIM = 16
CACHE = torch.cat([torch.arange(96).reshape(12, 8).cos(), torch.arange(96).reshape(12, 8).sin()], dim=-1)


def _expected(qkv: Any, heads: tuple[int, int, int], weights: tuple[Any, Any], neox: bool, positions: Any) -> Any:
    """One element at a time, in double precision."""
    result = qkv.double().view(len(qkv), sum(heads), DIM).clone()
    for token, head in itertools.product(range(len(qkv)), range(heads[0] + heads[1])):
        x = result[token, head].clone()
        x = x / (x.square().mean() + 1e-5).sqrt() * weights[head >= heads[0]].double()
        cos, sin = CACHE[positions[token]].double().chunk(2)
        for pair in range(8):
            a, b = (pair, pair + 8) if neox else (2 * pair, 2 * pair + 1)
            result[token, head, a] = x[a] * cos[pair] - x[b] * sin[pair]
            result[token, head, b] = x[b] * cos[pair] + x[a] * sin[pair]
    return result.view(len(qkv), -1)


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "qkv": torch.randn(5, 4 * DIM, dtype=torch.bfloat16),
        "num_heads_q": 2,
        "num_heads_k": 1,
        "num_heads_v": 1,
        "head_dim": DIM,
        "eps": 1e-5,
        "q_weight": torch.rand(DIM, dtype=torch.bfloat16),
        "k_weight": torch.rand(DIM, dtype=torch.bfloat16),
        "cos_sin_cache": CACHE,
        "is_neox": True,
        "position_ids": torch.arange(5),
    }
    return {**good, **changes}


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("heads", [(3, 2, 1), (2, 0, 0), (0, 1, 4)])
def test_it_agrees_with_the_definition_and_leaves_the_values(neox: bool, heads: tuple[int, int, int]) -> None:
    qkv = torch.randn(5, sum(heads) * DIM).half()
    weights = torch.rand(DIM).half(), torch.rand(DIM).half()
    positions = torch.randint(0, 12, (5,))
    expected = _expected(qkv, heads, weights, neox, positions)
    values = qkv[:, (heads[0] + heads[1]) * DIM :].clone()
    fused_qk_norm_rope(qkv, *heads, DIM, 1e-5, *weights, CACHE, neox, positions)
    torch.testing.assert_close(qkv.double(), expected, atol=1e-6, rtol=2.0**-11)
    assert torch.equal(qkv[:, (heads[0] + heads[1]) * DIM :], values)


def test_elements_beyond_the_rotated_ones_are_only_normed() -> None:
    arguments = call_with(cos_sin_cache=torch.cat([CACHE[:, :2], CACHE[:, 8:10]], dim=-1))
    unrotated = call_with(**{**arguments, "qkv": arguments["qkv"].clone(), "cos_sin_cache": CACHE[:, :0]})
    fused_qk_norm_rope(**arguments)
    fused_qk_norm_rope(**unrotated)
    turned, still = (call["qkv"].view(5, 4, DIM)[:, :3] for call in (arguments, unrotated))
    assert torch.equal(turned[..., 4:], still[..., 4:])
    assert not torch.equal(turned[1:, :, :4], still[1:, :, :4])


def test_nothing_to_do_is_no_error() -> None:
    fused_qk_norm_rope(
        **call_with(qkv=torch.empty(0, 4 * DIM).half(), position_ids=torch.empty(0, dtype=torch.int64),
                     q_weight=torch.ones(DIM).half(), k_weight=torch.ones(DIM).half())
    )  # fmt: skip
    arguments = call_with(num_heads_q=0, num_heads_k=0, num_heads_v=4)
    before = arguments["qkv"].clone()
    fused_qk_norm_rope(**arguments)
    assert torch.equal(arguments["qkv"], before)


MISTAKES: list[dict[str, Any]] = [
    {"qkv": torch.ones(5, 64)},
    {"qkv": torch.ones(5, 60).bfloat16()},
    {"qkv": torch.ones(64).bfloat16()},
    {"qkv": torch.ones(5, 128).bfloat16()[:, ::2]},
    {"num_heads_q": -1},
    {"head_dim": 0},
    {"q_weight": torch.ones(DIM)},
    {"k_weight": torch.ones(8).bfloat16()},
    {"q_weight": torch.ones(1, DIM).bfloat16()},
    {"position_ids": torch.arange(5, dtype=torch.int32)},
    {"position_ids": torch.arange(4)},
    {"position_ids": torch.arange(10)[::2]},
    {"cos_sin_cache": CACHE.half()},
    {"cos_sin_cache": CACHE[:, :8]},
    {"cos_sin_cache": CACHE[0]},
    {"cos_sin_cache": CACHE[:, :7].contiguous()},
    {"cos_sin_cache": CACHE.repeat(1, 2)},
]
