# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: its definition and vLLM's layers, every layout of scales. tests/gpu has the same calls."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.silu_and_mul_per_block_quant import silu_and_mul_per_block_quant  # noqa: E402

from .operation_checks import same_bits, steps  # noqa: E402

FLOAT8 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]
QUANTISED = [FLOAT8, torch.int8]


def spoiled(tokens: int, hidden: int, group: int, dtype: Any, transposed: bool, device: str = "cpu") -> tuple[Any, Any]:
    """Outputs that hold what no right answer is."""
    groups = hidden // group
    shape = (groups, tokens) if transposed else (tokens, groups)
    scales = torch.full(shape, torch.nan, device=device)
    out = torch.full((tokens, hidden), 0x7F if dtype == FLOAT8 else -128, dtype=torch.int8, device=device).view(dtype)
    return out, scales.t() if transposed else scales


class Call:
    """Random arguments, and whether the operation makes of them what it has to.

    Args:
        half: the type of input.
        dtype: that of the result.
    """

    def __init__(
        self, tokens: int, hidden: int, half: Any, dtype: Any, group: int, transposed: bool, device: str = "cpu"
    ) -> None:
        self.group, self.transposed = group, transposed
        self.input = torch.empty(tokens, 2 * hidden, dtype=half, device=device)
        self.outputs = partial(spoiled, tokens, hidden, group, dtype, transposed, device)
        self.out, self.scales = self.outputs()

    def refill(self) -> None:
        # Of a size that changes too: scales that belong to another input must not pass.
        self.input.normal_(std=random.choice([0.03, 1.0, 8.0]))
        out, scales = self.outputs()
        self.out.copy_(out)
        self.scales.copy_(scales)

    def run(self) -> None:
        silu_and_mul_per_block_quant(self.out, self.input, self.scales, self.group, None, self.transposed)

    def check(self, run: Any) -> None:
        run()
        gate, up = self.input.double().chunk(2, dim=-1)
        value = (gate / (1 + torch.exp(-gate)) * up).unflatten(-1, (-1, self.group))
        limit, smallest = (448.0, 1 / (448 * 512)) if self.out.dtype == FLOAT8 else (127.0, 2.0**-23)
        scale = (value.abs().amax(dim=-1) / limit).clamp(min=smallest)
        # The exponential and each of five operations lose a unit of float32 at most.
        torch.testing.assert_close(self.scales.double(), scale, rtol=2.0**-20, atol=0)
        quotient = (value / self.scales.double().unsqueeze(-1)).flatten(-2).clamp(-limit, limit).float()
        quotient = quotient if self.out.dtype == FLOAT8 else quotient.round()
        apart = (steps(self.out) - steps(quotient.to(self.out.dtype))).abs()
        assert int(apart.max()) <= 1
        assert int((apart > 0).sum()) <= 3 + 1e-4 * apart.numel()

    def compare(self, theirs: Any) -> None:
        out, scales = self.outputs()
        theirs(out, self.input, scales, self.group, None, self.transposed)
        assert same_bits(self.scales, scales)
        assert same_bits(self.out, out)


def _call(x: Any, dtype: Any, group: int, bound: float | None = None, transposed: bool = False) -> tuple[Any, Any]:
    tokens, hidden = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, hidden, dtype=dtype)
    scales = (
        torch.full((hidden // group, tokens), torch.nan).t() if transposed else torch.empty(tokens, hidden // group)
    )
    silu_and_mul_per_block_quant(
        out, x, scales, group, None if bound is None else torch.tensor(bound), is_scale_transposed=transposed
    )
    return out, scales


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("half", HALVES)
def test_it_is_within_a_step_of_double_precision(dtype: Any, half: Any) -> None:
    for (tokens, hidden), group, transposed in itertools.product([(1, 128), (9, 384)], [64, 128], [False, True]):
        call = Call(tokens, hidden, half, dtype, group, transposed)
        call.refill()
        call.check(call.run)


@pytest.mark.parametrize("bound", [0.003, 1e-9])
def test_a_scale_is_no_larger_than_the_bound(bound: float) -> None:
    x = torch.randn(9, 768).half()
    (_, free), (out, scales) = _call(x, FLOAT8, 64), _call(x, FLOAT8, 64, bound)
    assert torch.equal(scales, free.clamp(max=bound).clamp(min=1 / torch.tensor(448.0 * 512)))
    assert int((out.float().abs() == 448).sum()) > 9


def test_both_forms_of_transposed_scales_and_padded_ones_hold_the_same() -> None:
    for tokens in (1, 2, 3, 5):
        x = torch.randn(tokens, 768).bfloat16()
        out, scales = _call(x, FLOAT8, 128)
        padded = torch.full((3, 8), torch.nan).t()[:tokens]
        for given in (torch.empty(3, tokens).t(), torch.empty(3, tokens), padded):
            again = torch.empty_like(out)
            silu_and_mul_per_block_quant(again, x, given, 128, None, True)
            found = given.t() if given.shape == (3, tokens) and given.stride(0) >= given.stride(1) else given
            assert torch.equal(found, scales), (tokens, given.shape, given.stride())
            assert torch.equal(again.view(torch.int8), out.view(torch.int8))


@pytest.mark.parametrize(("dtype", "bits"), [(FLOAT8, 0x7E), (torch.int8, 0)])
def test_what_is_not_a_number_spoils_no_scale(dtype: Any, bits: int) -> None:
    x = torch.randn(2, 256).bfloat16()
    x[0, 5] = torch.nan
    x[1, :128] = torch.nan
    out, scales = _call(x, dtype, 64)
    clean = x.clone()
    clean[0, 5] = 0
    expected, expected_scales = _call(clean[:1], dtype, 64)
    assert torch.equal(scales[:1], expected_scales)
    out = out.view(torch.int8)
    assert out[0, 5] == bits
    assert (out[1] == bits).all()
    assert torch.equal(out[0, 6:], expected.view(torch.int8)[0, 6:])
    smallest = 2.0**-23 if dtype == torch.int8 else 1 / (448 * 512)
    assert (scales[1] == torch.tensor(smallest)).all()
    if dtype == FLOAT8:
        assert (_call(x, dtype, 64, 3.0)[1][1] == 3.0).all()


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "out": torch.zeros(3, 256, dtype=FLOAT8),
        "input": torch.randn(3, 512).half(),
        "scales": torch.zeros(3, 2),
        "group_size": 128,
        "scale_ub": torch.tensor(1.0),
        "is_scale_transposed": False,
    }
    return {**good, **changes}


MISTAKES: list[dict[str, Any]] = [
    {"out": torch.zeros(3, 256)},
    {"out": torch.zeros(3, 256, dtype=torch.int8)},
    {"out": torch.zeros(256, 3, dtype=FLOAT8).t()},
    {"out": torch.zeros(3, 128, dtype=FLOAT8)},
    {"out": torch.zeros(768, dtype=FLOAT8)},
    {"input": torch.zeros(3, 512)},
    {"input": torch.zeros(3, 1024).half()[:, ::2]},
    {"scales": torch.zeros(3, 2).double()},
    {"scales": torch.zeros(6)},
    {"scales": torch.zeros(2, 3)},
    {"scales": torch.zeros(2, 3).t()},
    {"is_scale_transposed": True},
    {"scales": torch.zeros(1, 2).expand(3, 2)},
    {"group_size": 32},
    {"out": torch.zeros(3, 192, dtype=FLOAT8), "input": torch.zeros(3, 384).half()},
    {"scale_ub": torch.ones(2)},
    {"scale_ub": torch.ones(1).half()},
]

NOTHING: list[dict[str, Any]] = [
    {
        "out": torch.zeros(tokens, hidden, dtype=FLOAT8),
        "input": torch.zeros(tokens, 2 * hidden).half(),
        "scales": torch.zeros(tokens, hidden // 128),
    }
    for tokens, hidden in ((0, 128), (3, 0), (0, 0))
]
