# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: its definition and vLLM's layers, every layout of scales, and clear errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.silu_and_mul_per_block_quant import silu_and_mul_per_block_quant  # noqa: E402

from .operation_checks import arguments_of_vllms_call  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

FLOAT8 = torch.float8_e4m3fn

# vLLM's activation and quantisation by groups, in float32 between the two as the operation has it. Prints how far the
# scales are apart, how many elements differ and by how many steps of float8, and how many are not zero.
AGAINST_VLLM = """
import itertools, json, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm_hwplugin.ops.silu_and_mul_per_block_quant import silu_and_mul_per_block_quant

def step(x):
    bits = x.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits)

found = []
for (tokens, hidden), dtype, group, transposed in itertools.product(
    [(1, 128), (7, 1536), (33, 512)], [torch.float16, torch.bfloat16], [64, 128], [False, True]
):
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, 2 * hidden) * 3).to(dtype)
    with set_current_vllm_config(VllmConfig()):
        quant = QuantFP8(False, GroupShape(1, group), column_major_scales=transposed, use_ue8m0=False)
        wanted, wanted_scales = quant.forward_native(SiluAndMul.forward_native(x.float()))
    out = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
    scales = torch.empty_like(wanted_scales)
    silu_and_mul_per_block_quant(out, x, scales, group, None, transposed)
    steps = (step(out) - step(wanted)).abs()
    apart = ((scales - wanted_scales).abs() / wanted_scales).max()
    same_layout = scales.stride() == wanted_scales.stride()
    found.append([float(apart), float((steps > 0).float().mean()), int(steps.max()), int((step(out) != 0).sum()),
                  same_layout])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_it_is_vllms_activation_and_then_its_quantisation_by_groups() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    assert len(found) == 3 * 2 * 2 * 2
    for apart, share, steps, nonzero, same_layout in found:
        # vLLM's layer takes the exponential of PyTorch's own silu, whose last bits differ.
        assert apart < 1e-6
        assert steps <= 1
        assert share < 0.001
        assert nonzero > 100
        assert same_layout


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0", "0.33.0"])
def test_vllm_calls_its_own_operation_with_the_same_arguments(vllm_tree: Callable[[str], Any], version: str) -> None:
    custom_ops = vllm_tree(version).read("vllm/_custom_ops.py")
    called_with = arguments_of_vllms_call(custom_ops, "silu_and_mul_per_block_quant")
    schema = torch.ops.hwplugin.silu_and_mul_per_block_quant.default._schema
    assert len(called_with) == len(schema.arguments)
    assert called_with[1:] == [argument.name for argument in schema.arguments][1:]
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["out", "scales"]


#: Every number of float8 e4m3 by its bits: a sign, four bits of exponent with a bias of 7, three of mantissa.
_FLOAT8 = torch.tensor(
    [
        (-1.0) ** (bits >> 7)
        * (1.0 + bits % 8 / 8 if bits // 8 % 16 else bits % 8 / 8)
        * 2.0 ** (max(bits // 8 % 16, 1) - 7)
        for bits in range(256)
        if bits % 128 != 127
    ],
    dtype=torch.float64,
)


def _nearest(quotient: Any, dtype: Any) -> Any:
    """The quantised value in double precision, found by trying every number of the type; of two the even one."""
    if dtype == torch.int8:
        return quotient.round().clamp(-128, 127)
    positive = _FLOAT8[:127]
    quotient = quotient.clamp(-448, 448)
    distance = (quotient.abs().unsqueeze(-1) - positive).abs()
    least = distance.amin(dim=-1, keepdim=True)
    candidates = distance == least
    even = candidates & (torch.arange(127) % 2 == 0)
    index = torch.where(even.any(-1), even.int().argmax(-1), candidates.int().argmax(-1))
    return positive[index] * quotient.sign()


def _expected(x: Any, dtype: Any, group: int, bound: float | None) -> tuple[Any, Any]:
    gate, up = x.double().chunk(2, dim=-1)
    value = (gate / (1 + torch.exp(-gate)) * up).unflatten(-1, (-1, group))
    limit, smallest = (127.0, 2.0**-23) if dtype == torch.int8 else (448.0, 1 / (448 * 512))
    scale = value.abs().amax(dim=-1) / limit
    scale = scale.clamp(max=bound) if bound is not None else scale
    return value.flatten(-2), scale.clamp(min=smallest)


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


@pytest.mark.parametrize("dtype", [FLOAT8, torch.int8])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_agrees_with_the_definition(dtype: Any, half: Any) -> None:
    bounds = [None] if dtype == torch.int8 else [None, 0.003, 1e-9]
    for size, bound, group in itertools.product([0.01, 1.0, 30.0], bounds, [64, 128]):
        x = (torch.randn(9, 768) * size).to(half)
        value, scale = _expected(x, dtype, group, bound)
        out, scales = _call(x, dtype, group, bound)
        torch.testing.assert_close(scales.double(), scale, rtol=1e-6, atol=0)
        quotient = value / scales.double().repeat_interleave(group, dim=1)
        found, wanted = out.double(), _nearest(quotient, dtype)
        # Where the quotient lies half way between two numbers, the last bit of float32 decides.
        assert (found != wanted).double().mean() < 0.002
        step = torch.ones(()) if dtype == torch.int8 else (wanted.abs() / 8).clamp(min=2.0**-9)
        assert ((found - wanted).abs() <= step).all()
        assert (found != 0).double().mean() > 0.3


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


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 1000).half()
    x = wide[:, 100:612]
    for found, wanted in zip(_call(x, FLOAT8, 64), _call(x.contiguous(), FLOAT8, 64), strict=True):
        assert torch.equal(found.float(), wanted.float())


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


def test_a_row_of_zeros_has_the_smallest_scale() -> None:
    out, scales = _call(torch.zeros(2, 256).half(), FLOAT8, 128)
    assert (out.float() == 0).all()
    assert (scales == torch.tensor(1 / (448 * 512))).all()


@pytest.mark.parametrize(("tokens", "hidden"), [(0, 128), (3, 0), (0, 0)])
def test_nothing_to_quantise_is_no_error(tokens: int, hidden: int) -> None:
    out, scales = _call(torch.empty(tokens, 2 * hidden).half(), torch.int8, 128)
    assert (out.numel(), scales.numel()) == (0, 0)


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
