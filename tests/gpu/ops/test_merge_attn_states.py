# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU, against the definition in float64 and against the installed vLLM's own kernel.

The result may be off by the rounding to its own type and by what float32 loses on the way: half a unit in the last
place, and 2^-20 of the two parts, which counts where they cancel. Inputs are random anew in every run; a failure shows
the seed. Results are poisoned before, and so is whatever has to have no influence.
"""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import MERGE_ATTN_STATES  # noqa: E402
from vllm_hwplugin.ops.merge_attn_states import merge_attn_states  # noqa: E402

from .kernel_checks import captured, load_kernel, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Digits, and the exponent below which a unit in the last place stays as it is.
FORMATS = {
    torch.float32: (24, -125),
    torch.bfloat16: (8, -125),
    torch.float16: (11, -13),
    torch.float8_e4m3fn: (4, -5),
}
SLACK = 2.0**-20
REPLAYS = 32
INF, NAN = float("inf"), float("nan")

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


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    load_kernel(MERGE_ATTN_STATES)


class Call:
    def __init__(
        self, shape: tuple[int, ...], dtype: Any, *, scaled: bool = False, context: float = 1.0, plain: bool = False
    ) -> None:
        self.tokens, self.heads, self.size, pitch = shape
        self.context = int(self.tokens * context)
        self.plain = plain
        self.prefix, self.suffix, self.output = (
            torch.empty(self.tokens, self.heads, pitch, device=DEVICE).to(kind)[..., : self.size]
            for kind in (dtype, dtype, torch.float8_e4m3fn if scaled else dtype)
        )
        # vLLM's kernel of 0.20.2 reads LSEs as if they were contiguous; ours takes any strides.
        self.lses = [torch.empty(self.heads, self.tokens, device=DEVICE) for _ in range(3)]
        if not plain:
            self.lses[1] = self.lses[1].t().contiguous().t()
        self.scale = torch.empty(1, device=DEVICE) if scaled else None

    def refill(self) -> None:
        for part, lse in zip((self.prefix, self.suffix), self.lses, strict=False):
            part.normal_()
            lse.normal_(std=4.0)
            chance = torch.rand(lse.shape, device=DEVICE)
            lse[chance < 0.2] = INF
            lse[chance < 0.1] = -INF
            # vLLM's kernel would take a NaN over, and the prefix's output where both are empty.
            part[lse.isinf().t()] = 0.0 if self.plain else NAN
        self.suffix[self.context :] = torch.randn_like(self.suffix[self.context :], dtype=torch.float32).to(
            self.suffix.dtype
        )
        if self.scale is not None:
            self.scale.uniform_(0.001, 0.1)
        self.poison()

    def poison(self) -> None:
        self.output.copy_(torch.full((), NAN, device=DEVICE))
        self.lses[2].fill_(NAN)

    def run(self, operation: Any = merge_attn_states) -> None:
        operation(
            self.output,
            self.lses[2],
            self.prefix,
            self.lses[0],
            self.suffix,
            self.lses[1],
            None if self.context == self.tokens else self.context,
            self.scale,
        )

    def expected(self) -> tuple[Any, Any, Any]:
        """Output and LSE in float64, and the size of what was added."""
        parts = torch.stack([self.prefix, self.suffix]).double()
        lses = torch.stack(self.lses[:2]).double()
        empty = lses.isinf()
        empty[0, :, self.context :] = True
        empty[1, :, self.context :] = False
        parts = parts.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
        known = lses.masked_fill(empty, -INF)
        # Beyond the context the suffix counts whatever its LSE.
        known[1, :, self.context :] = 0.0
        lse = torch.logsumexp(known, 0)
        weights = (known - lse).exp().nan_to_num().transpose(1, 2).unsqueeze(-1)
        lse[:, self.context :] = lses[1, :, self.context :]
        return (parts * weights).sum(0), lse, (parts * weights).abs().sum(0)

    def check(self, run: Any) -> None:
        expected, expected_lse, size = self.expected()
        run()
        if self.scale is not None:
            expected, size = expected / self.scale.double(), size / self.scale.double()
            expected = expected.clamp(-448, 448)
        digits, smallest = FORMATS[self.output.dtype]
        exponent = torch.frexp(expected).exponent.clamp(min=smallest)
        allowed = 0.5 * torch.ldexp(torch.ones_like(expected), exponent - digits) + SLACK * size
        found = self.output.float().double()
        assert bool(((found - expected).abs() <= allowed).all())
        lse = self.lses[2].double()
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        assert torch.equal(lse[lse.isinf()], expected_lse[lse.isinf()])
        finite = ~lse.isinf()
        assert bool(((lse - expected_lse)[finite].abs() <= SLACK * (1 + expected_lse[finite].abs())).all())


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_agrees_with_the_definition(shape: tuple[int, ...], mode: str) -> None:
    for dtype in DTYPES:
        for options in ({}, {"context": 0.5}, {"scaled": True}):
            call = Call(shape, dtype, **options)
            run = call.run if mode == "eager" else captured(call)
            # The large one takes its time in float64.
            for _ in range(REPLAYS if mode == "replayed" and call.tokens < 1000 else 1):
                call.refill()
                call.check(run)


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
    for shape in SHAPES.values():
        for options in ({}, {"context": 0.5}, {"scaled": True}):
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


def _arguments(**changes: Any) -> list[Any]:
    part = torch.ones(5, 3, 8, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.ones(3, 5, device=DEVICE)
    good = {
        "output": part.clone(),
        "output_lse": lse.clone(),
        "prefix_output": part,
        "prefix_lse": lse,
        "suffix_output": part,
        "suffix_lse": lse,
        "prefill_tokens_with_context": None,
        "output_scale": None,
    }
    return list({**good, **changes}.values())


def _ones(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.ones(*shape, dtype=dtype, device=DEVICE)


MISTAKES: dict[str, Any] = {
    "prefix_output is Double": lambda: {"prefix_output": _ones(5, 3, 8, dtype=torch.float64)},
    "suffix_output is Half": lambda: {"suffix_output": _ones(5, 3, 8, dtype=torch.float16)},
    "output is Float; expected prefix_output's": lambda: {"output": _ones(5, 3, 8, dtype=torch.float32)},
    "output is BFloat16; expected Float8": lambda: {"output_scale": _ones(1, dtype=torch.float32)},
    "output_scale has to be one Float": lambda: {
        "output": torch.empty(5, 3, 8, device=DEVICE).to(torch.float8_e4m3fn),
        "output_scale": _ones(2, dtype=torch.float32),
    },
    "prefix_output is not on output's device": lambda: {"prefix_output": torch.ones(5, 3, 8, dtype=torch.bfloat16)},
    "suffix_lse is not on output's device": lambda: {"suffix_lse": torch.ones(3, 5)},
    "output has 2 dimensions": lambda: {"output": _ones(5, 24)},
    r"suffix_output\.size\(0\) is 4; expected 5": lambda: {"suffix_output": _ones(4, 3, 8)},
    "the heads have 6 elements; expected a multiple of 8": lambda: {
        name: _ones(5, 3, 6) for name in ("output", "prefix_output", "suffix_output")
    },
    "suffix_output has stride 2": lambda: {"suffix_output": _ones(5, 3, 16)[..., ::2]},
    r"prefix_output\.stride\(0\) is 36": lambda: {"prefix_output": _ones(5, 3, 12)[..., :8]},
    "prefix_output does not begin at a multiple of 16": lambda: {"prefix_output": _ones(121)[1:].view(5, 3, 8)},
    "the shape of prefix_lse is not": lambda: {"prefix_lse": _ones(5, 3, dtype=torch.float32)},
    "suffix_lse is BFloat16": lambda: {"suffix_lse": _ones(3, 5)},
    r"output_lse\.stride\(1\) is 0": lambda: {"output_lse": _ones(3, 1, dtype=torch.float32).expand(3, 5)},
    r"output\.stride\(0\) is 0": lambda: {"output": _ones(1, 3, 8).expand(5, 3, 8)},
    "prefill_tokens_with_context is 6": lambda: {"prefill_tokens_with_context": 6},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_was_expected(words: str) -> None:
    with pytest.raises(RuntimeError, match=f"merge_attn_states: .*{words}"):
        merge_attn_states(*_arguments(**MISTAKES[words]()))
    merge_attn_states(*_arguments())


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 3, 8), (5, 0, 8), (5, 3, 0)])
def test_nothing_to_merge_is_no_error(tokens: int, heads: int, size: int) -> None:
    part, lse = _ones(tokens, heads, size), torch.zeros(heads, tokens, device=DEVICE)
    found = torch.full_like(lse, 7.0)
    merge_attn_states(torch.empty_like(part), found, part, lse, part, lse)
    torch.testing.assert_close(found, torch.full_like(found, 2.0).log())
