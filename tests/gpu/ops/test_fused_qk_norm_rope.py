# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU, against the definition in float64 and against the installed vLLM's own kernel.

The result may be off by the rounding to its own type and by what float32 loses on the way: half a unit in the last
place, and 2^-20 of the head's largest element, which counts where the products of a pair cancel. Inputs are random anew
in every run; a failure shows the seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import FUSED_QK_NORM_ROPE  # noqa: E402
from vllm_hwplugin.ops.fused_qk_norm_rope import fused_qk_norm_rope  # noqa: E402

from .kernel_checks import captured, load_kernel, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
DIGITS = {torch.bfloat16: 8, torch.float16: 11}
REPLAYS = 32
MAX_POSITION = 4096

# Heads of query, key and value, head size, rotated elements, tokens.
SHAPES = {
    "Qwen3-8B, TP8": (4, 1, 1, 128, 128, 1),
    "Qwen3-8B, prefill": (32, 8, 8, 128, 128, 3000),
    "Qwen3-30B-A3B, TP2": (16, 2, 2, 128, 128, 16),
    "an odd number of heads, prefill": (6, 1, 1, 128, 64, 12000),
    "heads of 64": (8, 2, 2, 64, 64, 33),
    "heads of 256, a quarter rotated": (4, 2, 2, 256, 64, 33),
    "heads of 512": (2, 1, 1, 512, 512, 9),
    "heads of 80: no power of two": (4, 2, 2, 80, 20, 33),
    "heads of 128, 24 rotated: no whole threads": (4, 2, 1, 128, 24, 33),
}


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    load_kernel(FUSED_QK_NORM_ROPE)


def _cache(rotary_dim: int, dtype: Any) -> Any:
    inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device="cuda", dtype=torch.float64) / rotary_dim)
    angles = torch.arange(MAX_POSITION, device="cuda", dtype=torch.float64)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


class Call:
    def __init__(self, shape: tuple[int, ...], dtype: Any, neox: bool, float_cache: bool) -> None:
        *self.heads, self.head_dim, self.rotary_dim, tokens = shape
        self.neox = neox
        self.qkv = torch.empty(tokens, sum(self.heads) * self.head_dim, dtype=dtype, device="cuda")
        self.positions = torch.empty(tokens, dtype=torch.int64, device="cuda")
        self.weights = [torch.empty(self.head_dim, dtype=dtype, device="cuda") for _ in range(2)]
        self.cache = _cache(self.rotary_dim, torch.float32 if float_cache else dtype)

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


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_agrees_with_the_definition(shape: tuple[int, ...], mode: str) -> None:
    for dtype, neox, float_cache in itertools.product(DTYPES, [True, False], [True, False]):
        call = Call(shape, dtype, neox, float_cache)
        run = call.run if mode == "eager" else captured(call)
        for _ in range(REPLAYS if mode == "replayed" else 1):
            call.refill()
            call.check(run)


@pytest.mark.sanitizer
@pytest.mark.parametrize("neox", [True, False])
def test_a_tensor_that_is_not_aligned_takes_another_path_to_the_same_result(neox: bool) -> None:
    call = Call((4, 1, 1, 128, 128, 33), torch.bfloat16, neox, False)
    for offset in (1, 3):
        space = torch.empty(call.qkv.numel() + offset, dtype=torch.bfloat16, device="cuda")
        call.qkv = space[offset:].view(call.qkv.shape)
        call.refill()
        call.check(call.run)


@pytest.mark.parametrize("neox", [True, False])
def test_a_token_gets_the_same_bits_alone_and_among_many(neox: bool) -> None:
    many = Call((6, 1, 1, 128, 128, 20000), torch.bfloat16, neox, False)
    many.refill()
    few = Call((6, 1, 1, 128, 128, 3), torch.bfloat16, neox, False)
    few.qkv.copy_(many.qkv[-3:])
    few.positions.copy_(many.positions[-3:])
    few.weights = many.weights
    many.run()
    few.run()
    assert torch.equal(few.qkv, many.qkv[-3:])


@pytest.mark.sanitizer
def test_nothing_to_do_is_no_error() -> None:
    for shape in ((4, 1, 1, 128, 128, 0), (0, 0, 3, 128, 128, 5)):
        call = Call(shape, torch.bfloat16, True, False)
        call.refill()
        before = call.qkv.clone()
        call.run()
        assert torch.equal(call.qkv, before)
    # Nothing is rotated, and all is normed.
    call = Call((4, 1, 1, 128, 0, 5), torch.bfloat16, True, False)
    call.refill()
    call.check(call.run)


@pytest.mark.sanitizer
def test_nothing_beside_the_tensor_is_written() -> None:
    call = Call((4, 1, 1, 128, 128, 33), torch.bfloat16, True, False)
    space = torch.full((64 + call.qkv.numel() + 64,), float("nan"), dtype=torch.bfloat16, device="cuda")
    call.qkv = space[64:-64].view(call.qkv.shape)
    call.refill()
    call.run()
    assert not call.qkv.isnan().any()
    assert int(space.isnan().sum()) == 128


def _mistakes() -> dict[str, tuple[dict[str, Any], str]]:
    def ones(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.ones(shape, dtype=dtype, device="cuda")

    long = torch.arange(10, device="cuda")
    return {
        "qkv of another type": ({"qkv": ones(5, 64, dtype=torch.float32)}, "qkv is Float; expected Half or BFloat16"),
        "qkv of another size": (
            {"qkv": ones(5, 60)},
            r"qkv has 2 dimensions and 300 elements; expected \[tokens, 64\]",
        ),
        "flat qkv": ({"qkv": ones(64)}, "qkv has 1 dimensions and 64 elements; expected"),
        "qkv with gaps": ({"qkv": ones(5, 128)[:, ::2]}, "qkv has to be contiguous"),
        "heads": ({"num_heads_q": -1}, "the numbers of heads are -1, 1, 1; expected 0 to"),
        "no head size": ({"head_dim": 0}, "head_dim is 0; expected 1 to"),
        "weight of another type": (
            {"q_weight": ones(16, dtype=torch.float32)},
            "q_weight is Float; expected BFloat16",
        ),
        "weight of another size": (
            {"k_weight": ones(8)},
            r"k_weight has 1 dimensions and 8 elements; expected \[16\]",
        ),
        "weight elsewhere": ({"k_weight": torch.ones(16).bfloat16()}, "k_weight is not on qkv's device, cuda:0"),
        "positions of another type": ({"position_ids": long[:5].int()}, "position_ids is Int; expected Long"),
        "other tokens": ({"position_ids": long[:4]}, "position_ids has 1 dimensions and 4 elements; expected"),
        "positions with gaps": ({"position_ids": long[::2]}, "position_ids has to be contiguous"),
        "positions elsewhere": ({"position_ids": torch.arange(5)}, "position_ids is not on qkv's device, cuda:0"),
        "cache of another type": (
            {"cos_sin_cache": ones(12, 16, dtype=torch.half)},
            "cos_sin_cache is Half; expected qkv's type, BFloat16, or Float",
        ),
        "cache with gaps": ({"cos_sin_cache": ones(12, 32)[:, :16]}, "cos_sin_cache has to be contiguous"),
        "flat cache": ({"cos_sin_cache": ones(16)}, "cos_sin_cache has 1 dimensions; expected"),
        "odd cache": ({"cos_sin_cache": ones(12, 7)}, "rotary_dim is 7; expected an even number"),
        "large cache": ({"cos_sin_cache": ones(12, 32)}, "rotary_dim is 32; expected an even number of at most"),
    }


def test_a_mistake_is_an_error_that_says_what_was_expected_and_writes_nothing() -> None:
    for name, (changes, words) in _mistakes().items():
        good = {
            "qkv": torch.randn(5, 64, device="cuda").bfloat16(),
            "num_heads_q": 2,
            "num_heads_k": 1,
            "num_heads_v": 1,
            "head_dim": 16,
            "eps": 1e-6,
            "q_weight": torch.ones(16, device="cuda").bfloat16(),
            "k_weight": torch.ones(16, device="cuda").bfloat16(),
            "cos_sin_cache": _cache(16, torch.bfloat16),
            "is_neox": True,
            "position_ids": torch.arange(5, device="cuda"),
        }
        arguments = {**good, **changes}
        before = arguments["qkv"].clone()
        with pytest.raises(RuntimeError, match=f"fused_qk_norm_rope: {words}"):
            fused_qk_norm_rope(**arguments)
        assert torch.equal(arguments["qkv"], before), name
        fused_qk_norm_rope(**good)


def test_vllms_own_operation_has_this_schema_and_differs_by_roundings_only() -> None:
    theirs = vllms("fused_qk_norm_rope")
    ours = torch.ops.hwplugin.fused_qk_norm_rope.default
    assert str(ours._schema) == str(theirs._schema).replace("_C::", "hwplugin::", 1)
    for dtype, neox, float_cache in itertools.product(DTYPES, [True, False], [True, False]):
        call = Call((16, 2, 2, 128, 64, 65), dtype, neox, float_cache)
        call.refill()
        before = call.qkv.clone()
        call.run(theirs)
        expected = call.qkv.clone()
        call.qkv.copy_(before)
        call.run(ours)
        assert not torch.equal(expected, before)
        torch.testing.assert_close(call.qkv, expected, atol=2.0**-18, rtol=2.0 ** (1 - DIGITS[dtype]))
