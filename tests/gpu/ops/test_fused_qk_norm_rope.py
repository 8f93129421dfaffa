# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU, against the definition in float64 and against the installed vLLM's own kernel.

tests/ops has the calls and what they are compared with. Inputs are random anew in every run; a failure shows the seed.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


from ...ops import test_fused_qk_norm_rope as calls  # noqa: E402
from ...ops.test_fused_qk_norm_rope import DIGITS, DTYPES  # noqa: E402
from .kernel_checks import check_in, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

Call = partial(calls.Call, device="cuda")

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
    "nothing rotated": (4, 1, 1, 128, 0, 5),
}


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_agrees_with_the_definition(shape: tuple[int, ...], mode: str) -> None:
    for dtype, neox, float_cache in itertools.product(DTYPES, [True, False], [True, False]):
        check_in(mode, Call(shape, dtype, neox, float_cache))


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


def test_vllms_own_kernel_differs_by_roundings_only() -> None:
    theirs = vllms("fused_qk_norm_rope")
    for dtype, neox, float_cache in itertools.product(DTYPES, [True, False], [True, False]):
        call = Call((16, 2, 2, 128, 64, 65), dtype, neox, float_cache)
        call.refill()
        before = call.qkv.clone()
        call.run(theirs)
        expected = call.qkv.clone()
        call.qkv.copy_(before)
        call.run()
        assert not torch.equal(expected, before)
        torch.testing.assert_close(call.qkv, expected, atol=2.0**-18, rtol=2.0 ** (1 - DIGITS[dtype]))
