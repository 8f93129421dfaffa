# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU: the installed vLLM's kernel but for the order of one sum, and within a step of double precision.

Inputs are random anew in every run; a failure shows the seed.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.rms_norm_dynamic_per_token_quant import (  # noqa: E402
    rms_norm_dynamic_per_token_quant,
)

from ...ops import test_rms_norm_dynamic_per_token_quant as calls  # noqa: E402
from ...ops.operation_checks import same_bits, steps  # noqa: E402
from ...ops.test_rms_norm_dynamic_per_token_quant import (  # noqa: E402
    DTYPES,
    EPSILON,
    FLOAT8,
    QUANTISED,
    most_apart,
)
from .kernel_checks import check_in, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

Call, _spoiled = partial(calls.Call, device="cuda"), partial(calls.spoiled, device="cuda")

#: Hidden sizes. Rows of one warp, with one chunk a lane and with four; rows of a block of every width; rows too long
#: for registers; rows that no load of 16 bytes divides.
HIDDEN = [8, 64, 264, 512, 1024, 1032, 2048, 4096, 5120, 7168, 8192, 12288, 16384, 16392, 32768, 1, 17, 1025]
#: Few rows get wide blocks, many get narrow ones.
ROWS = [1, 5, 520]


def compare(call: Any, theirs: Any) -> None:
    """With another's outcome: bit for bit in rows of the same scale, but for numbers that are nearly half way."""
    result, scale = call.outputs()
    residual = None if call.residual is None else call.before.clone()
    theirs(result, call.input, call.weight, scale, EPSILON, None, residual)
    if residual is not None:
        assert same_bits(call.residual, residual)
    # One unit of the type, of the smaller of the two, and the last bits of both sums.
    eps = torch.finfo(call.input.dtype).eps
    unit = eps * (1 + eps) + 2.0**-19
    torch.testing.assert_close(call.scale, scale, rtol=unit, atol=0)
    # Other sums: the last bits of float32, and seldom a unit of the type.
    alike = ((call.scale - scale).abs() <= 2.0**-20 * scale).flatten()
    assert int((~alike).sum()) <= 1 + 0.01 * len(alike)
    apart = (steps(call.result) - steps(result)).abs()[alike]
    assert apart.numel() == 0 or int(apart.max()) <= most_apart(call.input.dtype, call.result.dtype)
    assert int((apart > 0).sum()) <= 3 + 0.004 * apart.numel()


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_it_is_within_a_step_of_double_precision(hidden: int, mode: str) -> None:
    cases = list(itertools.product(ROWS, DTYPES, QUANTISED, [False, True]))
    for rows, half, dtype, added in cases if mode == "eager" else random.sample(cases, 2 if mode == "replayed" else 6):
        check_in(mode, Call(rows, hidden, half, dtype, added))


@pytest.mark.parametrize("hidden", HIDDEN)
def test_it_is_vllms_kernel_but_for_the_order_of_a_sum(hidden: int) -> None:
    theirs = vllms("rms_norm_dynamic_per_token_quant")
    for rows, half, dtype, added in itertools.product(ROWS, DTYPES, QUANTISED, [False, True]):
        call = Call(rows, hidden, half, dtype, added)
        call.refill()
        call.run()
        compare(call, theirs)


@pytest.mark.parametrize("half", DTYPES)
@pytest.mark.parametrize("added", [False, True])
def test_where_no_sum_is_rounded_every_bit_is_vllms(half: Any, added: bool) -> None:
    """Powers of two, few enough that any order gives the same sum; all the other roundings have to be vLLM's."""
    theirs = vllms("rms_norm_dynamic_per_token_quant")
    for hidden, dtype in itertools.product(HIDDEN, QUANTISED):
        call = Call(37, hidden, half, dtype, added)
        call.refill()
        call.input.copy_(torch.randint(0, 2, call.input.shape, device="cuda") * 2 - 1)
        if call.residual is not None:
            call.residual.copy_(torch.randint(-2, 3, call.input.shape, device="cuda"))
            call.before = call.residual.clone()
        call.run()
        result, scale = _spoiled((37, hidden), dtype)
        residual = None if call.residual is None else call.before.clone()
        theirs(result, call.input, call.weight, scale, EPSILON, None, residual)
        assert same_bits(call.scale, scale)
        assert same_bits(call.result, result)


@pytest.mark.parametrize("half", DTYPES)
def test_a_row_does_not_depend_on_the_rows_around_it(half: Any) -> None:
    for hidden, added in itertools.product([1024, 1032, 4096, 5120, 8192, 16384], [False, True]):
        call = Call(700, hidden, half, FLOAT8, added)
        call.refill()
        call.run()
        for first, last in ((0, 1), (3, 10), (150, 662), (100, 700)):
            result, scale = _spoiled((last - first, hidden), FLOAT8)
            residual = call.before[first:last].clone() if added else None
            rms_norm_dynamic_per_token_quant(
                result, call.input[first:last], call.weight, scale, EPSILON, None, residual
            )
            assert same_bits(scale, call.scale[first:last])
            assert same_bits(result, call.result[first:last])


@pytest.mark.sanitizer
@pytest.mark.parametrize("half", DTYPES)
def test_every_layout_takes_its_own_path_to_the_same(half: Any) -> None:
    for hidden in (512, 4096):
        call = Call(12, hidden, half, FLOAT8, True)
        call.refill()
        call.run()
        # Rows apart; several dimensions; then nothing at a multiple of 16 bytes.
        wide = torch.zeros(12, hidden + 32, device="cuda").to(half)
        odd = torch.zeros(12, hidden + 3, device="cuda").to(half)
        for held in (wide[:, 16:-16], wide[:, 1:-31], odd[:, 2:-1]):
            held.copy_(call.input)
            for given in (held, held.unflatten(0, (3, 4)), held.unflatten(0, (1, 12, 1))):
                result, scale = _spoiled(tuple(given.shape), FLOAT8)
                residual = call.before.clone().view(given.shape)
                rms_norm_dynamic_per_token_quant(result, given, call.weight, scale, EPSILON, None, residual)
                assert same_bits(residual.view(12, hidden), call.residual)
                torch.testing.assert_close(scale, call.scale, rtol=torch.finfo(half).eps + 2.0**-20, atol=0)
                apart = (steps(result.view(12, hidden)) - steps(call.result)).abs()
                assert int(apart.max()) <= 1
                assert float((apart > 0).float().mean()) < 0.1


@pytest.mark.parametrize("half", DTYPES)
def test_bounds_and_what_is_no_number_are_treated_as_vllm_treats_them(half: Any) -> None:
    theirs = vllms("rms_norm_dynamic_per_token_quant")
    for hidden, bound in itertools.product([64, 1000, 4096, 1025], [None, 0.5, 1e-6, -1.0, 1e9]):
        limit = None if bound is None else torch.tensor([bound], device="cuda")
        x = torch.randint(-2, 3, (7, hidden), device="cuda").to(half)
        x[1, 5] = torch.nan
        x[2, 6] = torch.inf
        x[3] = 0
        x[4, ::2] = -torch.inf
        weight = torch.randn(hidden, device="cuda").to(half)
        weight[0] = torch.finfo(half).max
        for dtype in QUANTISED if bound is None else [FLOAT8]:
            result, scale = _spoiled((7, hidden), dtype)
            wanted, wanted_scale = _spoiled((7, hidden), dtype)
            rms_norm_dynamic_per_token_quant(result, x, weight, scale, EPSILON, limit)
            theirs(wanted, x, weight, wanted_scale, EPSILON, limit, None)
            assert same_bits(scale, wanted_scale), (hidden, bound, dtype)
            assert same_bits(result, wanted), (hidden, bound, dtype)


def test_more_elements_than_32_bits_count() -> None:
    rows, hidden = 270_000, 8192
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("12 GiB of memory are not free")
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    result, scale = _spoiled((rows, hidden), FLOAT8)
    rms_norm_dynamic_per_token_quant(result, x, weight, scale, EPSILON)
    for part in (slice(0, 4), slice(262_142, 262_146), slice(-4, None)):
        wanted, wanted_scale = _spoiled((4, hidden), FLOAT8)
        rms_norm_dynamic_per_token_quant(wanted, x[part], weight, wanted_scale, EPSILON)
        assert same_bits(result[part], wanted)
        assert same_bits(scale[part], wanted_scale)
