# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: what its definition and vLLM's layers compute. tests/gpu has the same calls."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.rms_norm_dynamic_per_token_quant import (  # noqa: E402
    rms_norm_dynamic_per_token_quant,
)

from .operation_checks import same_bits, steps  # noqa: E402

FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
QUANTISED = [FLOAT8, torch.int8]
EPSILON = 1e-6


def spoiled(shape: tuple[int, ...], dtype: Any, device: str = "cpu") -> tuple[Any, Any]:
    """Outputs that hold what no right answer is."""
    result = torch.full(shape, 0x7F if dtype == FLOAT8 else -128, dtype=torch.int8, device=device).view(dtype)
    rows = result.numel() // shape[-1]
    return result, torch.full((rows, 1), torch.nan, device=device)


class Call:
    """Random arguments, and whether the operation makes of them what it has to.

    Args:
        half: the type of input.
        dtype: that of the result.
        added: there is a residual.
    """

    def __init__(self, rows: int, hidden: int, half: Any, dtype: Any, added: bool, device: str = "cpu") -> None:
        self.outputs = partial(spoiled, (rows, hidden), dtype, device)
        self.input = torch.empty(rows, hidden, dtype=half, device=device)
        self.weight = torch.empty(hidden, dtype=half, device=device)
        self.residual = torch.empty_like(self.input) if added else None
        self.result, self.scale = self.outputs()
        self.before: Any = None

    def refill(self) -> None:
        # Of a size that changes too: scales that belong to another input must not pass.
        self.input.normal_(std=random.choice([0.01, 1.0, 50.0]))
        self.weight.normal_(mean=1.0, std=0.3)
        result, scale = self.outputs()
        self.result.copy_(result)
        self.scale.copy_(scale)
        if self.residual is not None:
            self.residual.normal_()
            self.before = self.residual.clone()

    def run(self) -> None:
        rms_norm_dynamic_per_token_quant(self.result, self.input, self.weight, self.scale, EPSILON, None, self.residual)

    def check(self, run: Any) -> None:
        run()
        half, dtype = self.input.dtype, self.result.dtype
        total = self.input.float()
        if self.residual is not None:
            total = total + self.before.float()
            assert same_bits(self.residual, total.to(half))
        total = total.double()
        weight = self.weight.double()
        normal = total / (total.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        limit, smallest = (448.0, 1 / (448 * 512)) if dtype == FLOAT8 else (127.0, 2.0**-23)
        # Two roundings to the type, each of half a unit, and those of float32.
        unit = torch.finfo(half).eps + 2.0**-20
        scale = (normal * weight).abs().amax(-1, keepdim=True) / limit
        torch.testing.assert_close(self.scale.double(), scale.clamp(min=smallest), rtol=unit, atol=0)
        # The roundings that are part of the operation; a number that is nearly half way may have gone the other way.
        rounded = (normal.to(half) * self.weight).double()
        quotient = (rounded / self.scale.double()).clamp(-limit, limit).float()
        wanted = steps((quotient if dtype == FLOAT8 else quotient.round()).to(dtype))
        apart = (steps(self.result) - wanted).abs()
        assert int(apart.max()) <= most_apart(half, dtype)
        assert int((apart > 0).sum()) <= 3 + 0.004 * apart.numel()


def most_apart(half: Any, dtype: Any) -> int:
    """Steps between two results of which one had another sum.

    The normalised number may then round to its neighbour, and its product with the weight as well: two units of the
    input's type. Of bfloat16 at 127 that is 127 / 128, a step of int8 and what a tie adds.
    """
    return 2 if (half, dtype) == (torch.bfloat16, torch.int8) else 1


def _call(
    x: Any, weight: Any, dtype: Any, bound: float | None = None, residual: Any = None, epsilon: float = 1e-5
) -> tuple[Any, Any]:
    result = torch.empty(x.shape, dtype=dtype)
    scale = torch.full((x.numel() // x.shape[-1], 1), torch.nan)
    limit = None if bound is None else torch.tensor([bound])
    rms_norm_dynamic_per_token_quant(result, x, weight, scale, epsilon, limit, residual)
    return result, scale


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("half", DTYPES)
@pytest.mark.parametrize("added", [True, False])
def test_it_is_within_a_step_of_double_precision(dtype: Any, half: Any, added: bool) -> None:
    for rows, hidden in ((9, 300), (400, 64), (1, 17)):
        call = Call(rows, hidden, half, dtype, added)
        call.refill()
        call.check(call.run)


@pytest.mark.parametrize("bound", [0.5, -1.0])
def test_what_is_larger_than_the_bound_is_cut_off(bound: float) -> None:
    x, weight = torch.randn(9, 300), torch.rand(300) + 0.5
    (_, free), (result, scale) = _call(x, weight, FLOAT8), _call(x, weight, FLOAT8, bound)
    assert torch.equal(scale, free.clamp(max=bound / 448).clamp(min=1 / torch.tensor(448.0 * 512)))
    assert int((result.float().abs() == 448).sum()) > 9


def test_rows_may_lie_apart_and_have_several_dimensions() -> None:
    wide = torch.randn(6, 100).half()
    weight = torch.rand(40).half()
    x = wide[:, 8:48]
    wanted = _call(x.contiguous(), weight, FLOAT8)
    for given in (x, x.unflatten(0, (2, 3)), x.unflatten(0, (1, 6, 1))):
        for found, expected in zip(_call(given, weight, FLOAT8), wanted, strict=True):
            assert torch.equal(found.float().reshape(expected.shape), expected.float())
    one, scale = _call(x[0], weight, FLOAT8)
    assert torch.equal(one.float(), wanted[0][0].float())
    assert torch.equal(scale, wanted[1][:1])


@pytest.mark.parametrize(("dtype", "bits"), [(FLOAT8, 0x7E), (torch.int8, 0)])
def test_a_row_with_what_is_not_a_number_leaves_the_others_alone(dtype: Any, bits: int) -> None:
    x = torch.randn(3, 64).bfloat16()
    weight = torch.ones(64).bfloat16()
    wanted, wanted_scale = _call(x, weight, dtype)
    x[1, 7] = torch.nan
    result, scale = _call(x, weight, dtype)
    assert (result[1].view(torch.int8) == bits).all()
    assert scale[1] == torch.tensor(2.0**-23 if dtype == torch.int8 else 1 / (448 * 512))
    for row in (0, 2):
        assert torch.equal(result[row].float(), wanted[row].float())
        assert scale[row] == wanted_scale[row]


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "result": torch.zeros(3, 64, dtype=FLOAT8),
        "input": torch.randn(3, 64).half(),
        "weight": torch.ones(64).half(),
        "scale": torch.zeros(3, 1),
        "epsilon": 1e-5,
        "scale_ub": torch.tensor(1.0),
        "residual": torch.randn(3, 64).half(),
    }
    return {**good, **changes}


MISTAKES: list[dict[str, Any]] = [
    {"result": torch.zeros(3, 64)},
    {"result": torch.zeros(3, 64, dtype=torch.int8)},
    {"result": torch.zeros(64, 3, dtype=FLOAT8).t()},
    {"result": torch.zeros(192, dtype=FLOAT8)},
    {"input": torch.zeros(3, 64)},
    {"input": torch.zeros(3, 128).half()[:, ::2]},
    {"weight": torch.ones(32).half()},
    {"weight": torch.ones(128).half()[::2]},
    {"scale": torch.zeros(3, 1).double()},
    {"scale": torch.zeros(4)},
    {"scale": torch.zeros(6)[::2]},
    {"scale_ub": torch.ones(2)},
    {"scale_ub": torch.ones(1).half()},
    {"residual": torch.zeros(3, 64)},
    {"residual": torch.zeros(3, 32).half()},
    {"residual": torch.zeros(64, 3).half().t()},
    {
        "input": torch.zeros(4, 3, 64).half()[:, :2],
        "result": torch.zeros(4, 2, 64, dtype=FLOAT8),
        "scale": torch.zeros(8),
        "residual": None,
    },
    {
        "result": torch.zeros(3, 0, dtype=FLOAT8),
        "input": torch.zeros(3, 0).half(),
        "weight": torch.ones(0).half(),
        "residual": None,
    },
    {"input": torch.zeros(3, 64).double(), "weight": torch.zeros(64).double(), "residual": None},
]

#: Without a row.
NOTHING: list[dict[str, Any]] = [
    {
        "result": torch.zeros(0, 64, dtype=FLOAT8),
        "input": torch.zeros(0, 64).half(),
        "scale": torch.zeros(0, 1),
        "residual": None,
    }
]
