# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: what vLLM's norm and rotary embedding compute, in place. tests/gpu has the same calls.

The result may be off by the rounding to its own type and by what float32 loses on the way: half a unit in the last
place, and 2^-20 of the head's largest element, which counts where the products of a pair cancel.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.fused_qk_norm_rope import fused_qk_norm_rope  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16]
DIGITS = {torch.bfloat16: 8, torch.float16: 11}
MAX_POSITION = 4096

DIM = 16
CACHE = torch.cat([torch.arange(96).reshape(12, 8).cos(), torch.arange(96).reshape(12, 8).sin()], dim=-1)


def _cache(rotary_dim: int, dtype: Any, device: str) -> Any:
    inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(MAX_POSITION, device=device, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


class Call:
    """Random arguments, and whether the operation makes of them what it has to.

    Args:
        shape: heads of query, key and value, head size, rotated elements, tokens.
        float_cache: the cache is float32, else of the type.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, neox: bool, float_cache: bool, device: str = "cpu") -> None:
        *self.heads, self.head_dim, self.rotary_dim, tokens = shape
        self.neox = neox
        self.qkv = torch.empty(tokens, sum(self.heads) * self.head_dim, dtype=dtype, device=device)
        self.positions = torch.empty(tokens, dtype=torch.int64, device=device)
        self.weights = [torch.empty(self.head_dim, dtype=dtype, device=device) for _ in range(2)]
        self.cache = _cache(self.rotary_dim, torch.float32 if float_cache else dtype, device)

    def refill(self) -> None:
        self.qkv.normal_(std=8.0)
        self.positions.random_(0, MAX_POSITION)
        for weight in self.weights:
            weight.uniform_(0.5, 1.5)

    def by_head(self) -> Any:
        return self.qkv.view(len(self.qkv), sum(self.heads), self.head_dim)

    def run(self, operation: Any = fused_qk_norm_rope) -> None:
        operation(
            self.qkv, *self.heads, self.head_dim, 1e-6, *self.weights, self.cache, self.neox, self.positions
        )  # fmt: skip

    def expected(self) -> Any:
        """Query and key in float64."""
        q_heads, k_heads, _ = self.heads
        x = self.by_head()[:, : q_heads + k_heads].double()
        weight = torch.stack([self.weights[0]] * q_heads + [self.weights[1]] * k_heads).double()
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight
        cos, sin = self.cache[self.positions].double().unsqueeze(1).chunk(2, dim=-1)
        half = self.rotary_dim // 2
        first = slice(0, half) if self.neox else slice(0, self.rotary_dim, 2)
        second = slice(half, self.rotary_dim) if self.neox else slice(1, self.rotary_dim, 2)
        result = x.clone()
        result[..., first] = x[..., first] * cos - x[..., second] * sin
        result[..., second] = x[..., second] * cos + x[..., first] * sin
        return result

    def check(self, run: Any) -> None:
        expected = self.expected()
        rotated = self.heads[0] + self.heads[1]
        values = self.by_head()[:, rotated:].clone()
        run()
        found = self.by_head()[:, :rotated].double()
        unit = torch.ldexp(torch.ones_like(expected), torch.frexp(expected).exponent - DIGITS[self.qkv.dtype])
        allowed = 0.5 * unit + 2.0**-20 * expected.abs().amax(dim=-1, keepdim=True)
        assert bool(((found - expected).abs() <= allowed).all())
        assert torch.equal(self.by_head()[:, rotated:], values)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
def test_it_agrees_with_the_definition_and_leaves_the_values(neox: bool, dtype: Any) -> None:
    # Without keys, without queries, and with a part of each head, all of it or nothing rotated.
    shapes = ((3, 2, 1, 16, 16, 5), (2, 0, 0, 16, 4, 5), (0, 1, 4, 16, 0, 5), (4, 2, 2, 80, 20, 3), (2, 1, 1, 16, 8, 0))
    for shape, float_cache in itertools.product(shapes, [True, False]):
        call = Call(shape, dtype, neox, float_cache)
        call.refill()
        call.check(call.run)


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

NOTHING: list[dict[str, Any]] = [
    {"qkv": torch.ones(0, 4 * DIM).bfloat16(), "position_ids": torch.arange(0)},
    {"num_heads_q": 0, "num_heads_k": 0, "num_heads_v": 4},
]
