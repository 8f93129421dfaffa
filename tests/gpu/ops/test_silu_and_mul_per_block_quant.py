# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU: bit for bit what the installed vLLM's kernel writes, and within a step of double precision.

Inputs are random anew in every run; a failure shows the seed.
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.silu_and_mul_per_block_quant import silu_and_mul_per_block_quant  # noqa: E402

from ...ops import test_silu_and_mul_per_block_quant as calls  # noqa: E402
from ...ops.operation_checks import same_bits  # noqa: E402
from ...ops.test_silu_and_mul_per_block_quant import FLOAT8, HALVES, QUANTISED  # noqa: E402
from .kernel_checks import check_in, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

Call, _spoiled = partial(calls.Call, device="cuda"), partial(calls.spoiled, device="cuda")

#: Tokens and hidden size. Warps that hold several rows, blocks that hold several, rows of several blocks, the last ones
#: not full, and enough elements that a thread has two rows.
SHAPES = {
    "one group": (1, 128),
    "less than a warp": (5, 384),
    "a warp and a half": (33, 384),
    "drafter": (7, 1536),
    "one row": (1, 12288),
    "blocks of unequal size": (3, 18944),
    "decode": (64, 8192),
    "two rows a thread": (4099, 1152),
    "two rows a thread, narrow": (40001, 128),
}


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_within_a_step_of_double_precision(shape: tuple[int, int], mode: str) -> None:
    cases = list(itertools.product(HALVES, QUANTISED, [64, 128], [False, True]))
    for case in random.sample(cases, 2) if mode == "replayed" else cases:
        check_in(mode, Call(*shape, *case))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_bit_for_bit_vllms_kernel(shape: tuple[int, int]) -> None:
    theirs = vllms("silu_and_mul_per_block_quant")
    for half, dtype, group, transposed in itertools.product(HALVES, QUANTISED, [64, 128], [False, True]):
        call = Call(*shape, half, dtype, group, transposed)
        for _ in range(3):
            call.refill()
            call.run()
            call.compare(theirs)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("half", HALVES)
def test_every_number_of_a_half_type_is_treated_as_vllm_treats_it(half: Any, dtype: Any) -> None:
    """As gate and as up, infinities and what is not a number among them, beside their like and beside any other."""
    theirs = vllms("silu_and_mul_per_block_quant")
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(half)
    finite = every[every.isfinite()]
    finite = finite[: len(finite) // 128 * 128]
    ones = torch.ones_like(every)
    pairs = [
        (every, ones),
        (ones, every),
        (every, every[torch.randperm(len(every), device="cuda")]),
        (finite, torch.randn(len(finite), device="cuda").to(half)),
        (finite[torch.randperm(len(finite), device="cuda")], finite),
        (torch.full_like(every, 3e4), torch.full_like(every, 3e4)),
    ]
    bounds = [None] if dtype == torch.int8 else [None, torch.tensor(1e-3, device="cuda")]
    for (gate, up), group, bound in itertools.product(pairs, [64, 128], bounds):
        x = torch.cat([gate.view(-1, 128), up.view(-1, 128)], dim=1)
        found, wanted = (_spoiled(len(x), 128, group, dtype, False) for _ in range(2))
        silu_and_mul_per_block_quant(found[0], x, found[1], group, bound)
        theirs(wanted[0], x, wanted[1], group, bound, False)
        assert same_bits(found[1], wanted[1])
        assert same_bits(found[0], wanted[0])


@pytest.mark.sanitizer
@pytest.mark.parametrize("half", HALVES)
def test_every_layout_holds_the_same(half: Any) -> None:
    x = torch.randn(37, 2 * 1536, device="cuda").to(half)
    for dtype, group in itertools.product(QUANTISED, [64, 128]):
        wanted, wanted_scales = _spoiled(37, 1536, group, dtype, False)
        silu_and_mul_per_block_quant(wanted, x, wanted_scales, group)
        groups = 1536 // group
        padded = torch.full((groups, 40), torch.nan, device="cuda").t()[:37]
        turned = torch.full((groups, 37), torch.nan, device="cuda")
        for scales in (padded, turned.t(), turned):
            out, _ = _spoiled(37, 1536, group, dtype, False)
            silu_and_mul_per_block_quant(out, x, scales, group, None, True)
            assert same_bits(out, wanted)
            assert same_bits(scales if scales.shape == (37, groups) else scales.t(), wanted_scales)
        # Rows apart; then nothing at a multiple of 16 bytes: the first element, the rows, and the output.
        wide = torch.zeros(37, 2 * 1536 + 16, device="cuda").to(half)
        odd = torch.zeros(37, 2 * 1536 + 3, device="cuda").to(half)
        space = torch.zeros(37 * 1536 + 1, dtype=torch.int8, device="cuda")
        for held in (wide[:, 8:-8], wide[:, 1:-15], odd[:, 2:-1]):
            held.copy_(x)
            out, scales = _spoiled(37, 1536, group, dtype, False)
            silu_and_mul_per_block_quant(out, held, scales, group)
            assert same_bits(out, wanted)
            assert same_bits(scales, wanted_scales)
        out = space[1:].view(37, 1536).view(dtype)
        silu_and_mul_per_block_quant(out, x, wanted_scales, group)
        assert same_bits(out, wanted)


def test_a_row_does_not_depend_on_the_rows_around_it() -> None:
    x = torch.randn(9000, 2 * 512, device="cuda").bfloat16()
    whole, whole_scales = _spoiled(9000, 512, 128, FLOAT8, False)
    silu_and_mul_per_block_quant(whole, x, whole_scales, 128)
    for first, last in ((0, 1), (5, 12), (8001, 9000)):
        out, scales = _spoiled(last - first, 512, 128, FLOAT8, False)
        silu_and_mul_per_block_quant(out, x[first:last], scales, 128)
        assert same_bits(out, whole[first:last])
        assert same_bits(scales, whole_scales[first:last])


def test_more_elements_than_32_bits_count() -> None:
    tokens, hidden = 140_000, 8192
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("12 GiB of memory are not free")
    x = torch.empty(tokens, 2 * hidden, dtype=torch.bfloat16, device="cuda").normal_()
    out, scales = _spoiled(tokens, hidden, 128, FLOAT8, False)
    silu_and_mul_per_block_quant(out, x, scales, 128)
    for rows in (slice(0, 4), slice(131_070, 131_074), slice(-4, None)):
        wanted, wanted_scales = _spoiled(4, hidden, 128, FLOAT8, False)
        silu_and_mul_per_block_quant(wanted, x[rows], wanted_scales, 128)
        assert same_bits(out[rows], wanted)
        assert same_bits(scales[rows], wanted_scales)
