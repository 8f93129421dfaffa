# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: attention over parts of the keys becomes attention over all. tests/gpu has the same calls.

The result may be off by the rounding to its own type and by what float32 loses on the way: half a unit in the last
place, and 2^-20 of the two parts, which counts where they cancel. Results are poisoned before, and so is whatever has
to have no influence.
"""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.merge_attn_states import merge_attn_states  # noqa: E402

TOKENS, HEADS, SIZE = 5, 3, 8
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPTIONS: list[dict[str, Any]] = [{}, {"context": 0.5}, {"scaled": True}]
# Digits, and the exponent below which a unit in the last place stays as it is.
FORMATS = {
    torch.float32: (24, -125),
    torch.bfloat16: (8, -125),
    torch.float16: (11, -13),
    torch.float8_e4m3fn: (4, -5),
}
SLACK = 2.0**-20


class Call:
    """Random arguments, and whether the operation makes of them what it has to.

    Args:
        shape: tokens, heads, head size, elements between heads.
        scaled: the output has 8 bits.
        context: the share of tokens that have a prefix.
        plain: as vLLM's kernel takes them, too. That of 0.20.2 reads LSEs as if they were contiguous, takes a NaN over,
            and takes the prefix's output where both parts are empty.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        scaled: bool = False,
        context: float = 1.0,
        plain: bool = False,
        device: str = "cpu",
    ) -> None:
        self.tokens, self.heads, self.size, pitch = shape
        self.context = int(self.tokens * context)
        self.plain = plain
        self.prefix, self.suffix, self.output = (
            torch.empty(self.tokens, self.heads, pitch, device=device).to(kind)[..., : self.size]
            for kind in (dtype, dtype, torch.float8_e4m3fn if scaled else dtype)
        )
        self.lses = [torch.empty(self.heads, self.tokens, device=device) for _ in range(3)]
        if not plain:
            self.lses[1] = self.lses[1].t().contiguous().t()
        self.scale = torch.empty(1, device=device) if scaled else None

    def refill(self) -> None:
        for part, lse in zip((self.prefix, self.suffix), self.lses, strict=False):
            part.normal_()
            lse.normal_(std=4.0)
            chance = torch.rand_like(lse)
            lse[chance < 0.2] = INF
            lse[chance < 0.1] = -INF
            part[lse.isinf().t()] = 0.0 if self.plain else NAN
        self.suffix[self.context :] = torch.randn_like(self.suffix[self.context :], dtype=torch.float32).to(
            self.suffix.dtype
        )
        if self.scale is not None:
            self.scale.uniform_(0.001, 0.1)
        self.poison()

    def poison(self) -> None:
        self.output.copy_(torch.full((), NAN, device=self.output.device))
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [*OPTIONS, {"context": 0.0}], ids=str)
def test_it_agrees_with_the_definition(options: dict[str, Any], dtype: Any) -> None:
    for shape in ((1, 8, 128, 128), (33, 5, 80, 80), (7, 3, 8, 8), (33, 4, 128, 192)):
        call = Call(shape, dtype, **options)
        call.refill()
        call.check(call.run)


def test_what_is_no_number_does_not_become_one() -> None:
    call = Call((TOKENS, HEADS, SIZE, SIZE), torch.float32)
    call.refill()
    for part, lse in zip((call.prefix, call.suffix), call.lses, strict=False):
        part.normal_()
        lse.normal_()
    call.lses[0][1, 2] = NAN
    call.lses[1][1, 2] = -INF
    call.run()
    assert call.output[2, 1].isnan().all()
    assert call.lses[2].isnan().nonzero().tolist() == [[1, 2]]
    assert call.output.isnan().sum() == SIZE


@pytest.mark.parametrize("overwritten", [0, 1], ids=["the prefix's", "the suffix's"])
def test_results_may_take_the_place_of_what_is_read(overwritten: int) -> None:
    call = Call((TOKENS, HEADS, SIZE, 2 * SIZE), torch.float32)
    call.refill()
    call.run()
    output, lse, call.lses[2] = call.output.clone(), call.lses[2], call.lses[overwritten]
    call.output = (call.prefix, call.suffix)[overwritten]
    call.run()
    assert torch.equal(call.output, output)
    assert torch.equal(call.lses[2], lse)


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "output": torch.full((TOKENS, HEADS, SIZE), 7.0),
        "output_lse": torch.full((HEADS, TOKENS), 7.0),
        "prefix_output": torch.ones(TOKENS, HEADS, SIZE),
        "prefix_lse": torch.ones(HEADS, TOKENS),
        "suffix_output": torch.ones(TOKENS, HEADS, SIZE),
        "suffix_lse": torch.ones(HEADS, TOKENS),
        "prefill_tokens_with_context": None,
        "output_scale": None,
    }
    return {**good, **changes}


def _heads(*shape: int, **more: Any) -> Any:
    return torch.ones(*shape, **more)


MISTAKES: list[dict[str, Any]] = [
    {"prefix_output": _heads(5, 3, 8, dtype=torch.float64)},
    {"suffix_output": _heads(5, 3, 8).half()},
    {"output": _heads(5, 3, 8).half()},
    {"output_scale": torch.ones(1)},
    {"output_scale": torch.ones(2), "output": _heads(5, 3, 8).to(torch.float8_e4m3fn)},
    {"output": _heads(5, 24)},
    {"suffix_output": _heads(4, 3, 8)},
    {"suffix_output": _heads(5, 3, 16)[..., ::2]},
    {"prefix_output": _heads(5, 3, 9)[..., :8]},
    {"prefix_output": _heads(121)[1:].view(5, 3, 8)},
    {"prefix_lse": torch.ones(5, 3)},
    {"suffix_lse": torch.ones(3, 5).half()},
    {"output_lse": torch.ones(3, 1).expand(3, 5)},
    {"output": _heads(1, 3, 8).expand(5, 3, 8)},
    {name: _heads(5, 3, 6) for name in ("output", "prefix_output", "suffix_output")},
    {"prefill_tokens_with_context": 6},
    {"prefill_tokens_with_context": -1},
]
