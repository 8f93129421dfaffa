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

from vllm_hwplugin.ops.merge_attn_states import merge_attn_states  # noqa: E402

from ...ops import test_merge_attn_states as calls  # noqa: E402
from ...ops.test_merge_attn_states import DTYPES, FORMATS, OPTIONS, SLACK  # noqa: E402
from .kernel_checks import check_in, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
REPLAYS = 32
Call = partial(calls.Call, device=DEVICE)

# Tokens, heads, head size, elements between heads.
SHAPES = {
    "one token": (1, 8, 128, 128),
    "decode": (64, 8, 128, 128),
    "prefill": (3000, 32, 128, 128),
    "heads of 80: rows that fill no block": (33, 5, 80, 80),
    "heads of 8: more threads than packs": (7, 3, 8, 8),
    "MLA: heads of 128 in rows of 192": (33, 16, 128, 192),
    "heads of 512": (33, 4, 512, 512),
    "heads of 8192: several rounds": (3, 2, 8192, 8192),
}


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_agrees_with_the_definition(shape: tuple[int, ...], mode: str) -> None:
    for dtype, options in itertools.product(DTYPES, OPTIONS):
        # The large one takes its time in float64.
        check_in(mode, Call(shape, dtype, **options), replays=1 if shape[0] > 1000 else REPLAYS)


def test_a_token_gets_the_same_bits_alone_and_among_many() -> None:
    many = Call((3000, 8, 128, 128), torch.bfloat16)
    many.refill()
    many.run()
    for token in (0, 1234, 2999):
        alone = Call((1, 8, 128, 128), torch.bfloat16)
        for target, source in ((alone.prefix, many.prefix), (alone.suffix, many.suffix)):
            target.copy_(source[token : token + 1])
        for target, source in zip(alone.lses, many.lses, strict=True):
            target.copy_(source[:, token : token + 1])
        alone.poison()
        alone.run()
        assert torch.equal(alone.output[0], many.output[token])
        assert torch.equal(alone.lses[2][:, 0], many.lses[2][:, token])


@pytest.mark.sanitizer
def test_it_writes_nothing_beside_the_heads_and_may_write_over_its_input() -> None:
    call = Call((33, 4, 128, 192), torch.bfloat16)
    call.refill()
    call.run()
    whole = torch.full((33, 4, 192), 7.0, dtype=torch.bfloat16, device=DEVICE)
    inside = whole[..., :128]
    inside.copy_(call.prefix)
    merge_attn_states(inside, None, inside, call.lses[0], call.suffix, call.lses[1])
    assert torch.equal(inside, call.output)
    assert bool((whole[..., 128:] == 7.0).all())


@pytest.mark.parametrize("overwritten", [0, 1], ids=["the prefix's", "the suffix's"])
@pytest.mark.parametrize("size", [128, 192, 320, 512])
def test_the_merged_lse_may_take_the_place_of_one_that_is_read(size: int, overwritten: int) -> None:
    """Heads of 192 in 16 bits lie in one warp in some rows and in two in others; of 320 and of 512 always in two."""
    for dtype in DTYPES:
        call = Call((1025, 16, size, size), dtype)
        call.refill()
        call.run()
        output, lse, before = call.output.clone(), call.lses[2], call.lses[overwritten].clone()
        call.lses[2] = call.lses[overwritten]
        for _ in range(REPLAYS):
            call.lses[2].copy_(before)
            call.output.zero_()
            call.run()
            assert torch.equal(call.output, output)
            assert torch.equal(call.lses[2], lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_vllms_kernel(dtype: Any) -> None:
    stock = vllms("merge_attn_states")
    for shape, options in itertools.product(SHAPES.values(), OPTIONS):
        call = Call(shape, dtype, plain=True, **options)
        call.refill()
        call.run(stock)
        theirs, their_lse = call.output.float(), call.lses[2].clone()
        call.poison()
        call.run()
        digits, smallest = FORMATS[call.output.dtype]
        unit = torch.ldexp(torch.ones_like(theirs), torch.frexp(theirs).exponent.clamp(min=smallest) - digits)
        size = call.expected()[2] if call.scale is None else call.expected()[2] / call.scale
        assert bool(((call.output.float() - theirs).abs() <= unit + 2 * SLACK * size).all())
        torch.testing.assert_close(call.lses[2], their_lse, atol=4e-6, rtol=4e-6)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 3, 8), (5, 0, 8), (5, 3, 0)])
def test_nothing_to_merge_is_no_error(tokens: int, heads: int, size: int) -> None:
    part, lse = torch.ones(tokens, heads, size, device=DEVICE).bfloat16(), torch.zeros(heads, tokens, device=DEVICE)
    found = torch.full_like(lse, 7.0)
    merge_attn_states(torch.empty_like(part), found, part, lse, part, lse)
    torch.testing.assert_close(found, torch.full_like(found, 2.0).log())
