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

from vllm_hwplugin.ops.compile.spec import SILU_AND_MUL_PER_BLOCK_QUANT  # noqa: E402
from vllm_hwplugin.ops.silu_and_mul_per_block_quant import silu_and_mul_per_block_quant  # noqa: E402

from .kernel_checks import captured, load_kernel, same_bits, steps, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

FLOAT8 = torch.float8_e4m3fn
HALVES = [torch.bfloat16, torch.float16]
QUANTISED = [FLOAT8, torch.int8]
REPLAYS = 32

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


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    load_kernel(SILU_AND_MUL_PER_BLOCK_QUANT)


def _spoiled(tokens: int, hidden: int, group: int, dtype: Any, transposed: bool) -> tuple[Any, Any]:
    """Outputs that hold what no right answer is."""
    groups = hidden // group
    shape = (groups, tokens) if transposed else (tokens, groups)
    scales = torch.full(shape, torch.nan, device="cuda")
    out = torch.full((tokens, hidden), 0x7F if dtype == FLOAT8 else -128, dtype=torch.int8, device="cuda").view(dtype)
    return out, scales.t() if transposed else scales


class Call:
    def __init__(self, tokens: int, hidden: int, half: Any, dtype: Any, group: int, transposed: bool) -> None:
        self.group, self.transposed = group, transposed
        self.input = torch.empty(tokens, 2 * hidden, dtype=half, device="cuda")
        self.outputs = partial(_spoiled, tokens, hidden, group, dtype, transposed)
        self.out, self.scales = self.outputs()

    def refill(self) -> None:
        # Of a size that changes too: scales that belong to another input must not pass.
        self.input.normal_(std=random.choice([0.03, 1.0, 8.0]))
        out, scales = self.outputs()
        self.out.copy_(out)
        self.scales.copy_(scales)

    def run(self) -> None:
        silu_and_mul_per_block_quant(self.out, self.input, self.scales, self.group, None, self.transposed)

    def check(self) -> None:
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


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_within_a_step_of_double_precision(shape: tuple[int, int], mode: str) -> None:
    replayed = mode == "replayed"
    cases = list(itertools.product(HALVES, QUANTISED, [64, 128], [False, True]))
    for half, dtype, group, transposed in random.sample(cases, 2) if replayed else cases:
        call = Call(*shape, half, dtype, group, transposed)
        run = call.run if mode == "eager" else captured(call)
        for _ in range(REPLAYS if replayed else 1):
            call.refill()
            run()
            call.check()


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


def test_vllms_own_operation_has_this_schema() -> None:
    ours = torch.ops.hwplugin.silu_and_mul_per_block_quant.default
    assert str(ours._schema) == str(vllms("silu_and_mul_per_block_quant")._schema).replace("_C::", "hwplugin::", 1)


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


@pytest.mark.sanitizer
def test_nothing_beside_the_outputs_is_written() -> None:
    for tokens, hidden in ((3, 192), (5, 18944 // 64 * 64), (2, 64)):
        space = torch.full((64 + tokens * hidden + 64,), 0x55, dtype=torch.int8, device="cuda")
        floats = torch.full((64 + tokens * hidden // 64 + 64,), torch.nan, device="cuda")
        x = torch.randn(tokens, 2 * hidden, device="cuda").half()
        scales = floats[64:-64].view(tokens, hidden // 64)
        silu_and_mul_per_block_quant(space[64:-64].view(tokens, hidden).view(FLOAT8), x, scales, 64)
        assert not scales.isnan().any()
        for beside in (floats[:64], floats[-64:]):
            assert beside.isnan().all()
        for beside in (space[:64], space[-64:]):
            assert (beside == 0x55).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 128), (3, 0), (0, 0)])
def test_nothing_to_quantise_is_no_error(tokens: int, hidden: int) -> None:
    out, scales = _spoiled(tokens, hidden, 128, FLOAT8, True)
    silu_and_mul_per_block_quant(out, torch.empty(tokens, 2 * hidden, device="cuda").half(), scales, 128, None, True)


def _mistakes() -> dict[str, tuple[dict[str, Any], str]]:
    def zeros(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    return {
        "out of another type": ({"out": zeros(3, 256)}, "out is Float; expected Float8_e4m3fn or Char"),
        "out elsewhere": ({"out": torch.zeros(3, 256, dtype=FLOAT8)}, "out is not on input's device, cuda:0"),
        "a bound for int8": ({"out": zeros(3, 256, dtype=torch.int8)}, "scale_ub is given; expected it for Float8"),
        "turned out": ({"out": zeros(256, 3, dtype=FLOAT8).t()}, "out is not contiguous"),
        "smaller out": ({"out": zeros(3, 128, dtype=FLOAT8)}, r"input is \[3, 512\] and out is \[3, 128\]; expected"),
        "flat out": ({"out": zeros(768, dtype=FLOAT8)}, "input has 2 dimensions and out has 1; expected"),
        "input of another type": ({"input": zeros(3, 512)}, "input is Float; expected Half or BFloat16"),
        "gaps": ({"input": zeros(3, 1024).half()[:, ::2]}, "input has stride 2 in its last dimension; expected 1"),
        "scales of another type": ({"scales": zeros(3, 2).double()}, "scales is Double; expected Float"),
        "scales elsewhere": ({"scales": torch.zeros(3, 2)}, "scales is not on input's device, cuda:0"),
        "flat scales": ({"scales": zeros(6)}, "scales has 1 dimensions; expected 2"),
        "scales of another shape": ({"scales": zeros(2, 3)}, r"scales has shape \[2, 3\]; expected \[3, 2\]"),
        "turned scales": ({"scales": zeros(2, 3).t()}, "scales has strides 1 and 3; expected those of a contiguous"),
        "scales that overlap": ({"scales": zeros(1, 2).expand(3, 2)}, "scales has strides 0 and 1; expected those of"),
        "not turned": ({"is_scale_transposed": True}, "scales has strides 2 and 1; expected those of a transposed"),
        "group size": ({"group_size": 32}, "group_size is 32; expected 64 or 128"),
        "part of a group": (
            {"out": zeros(3, 192, dtype=FLOAT8), "input": zeros(3, 384).half()},
            "hidden_size is 192; expected a multiple of group_size=128",
        ),
        "two bounds": ({"scale_ub": zeros(2)}, "scale_ub has 2 elements of type Float; expected one Float"),
        "bound of another type": ({"scale_ub": zeros(1).half()}, "scale_ub has 1 elements of type Half; expected one"),
        "bound elsewhere": ({"scale_ub": torch.zeros(1)}, "scale_ub is not on input's device, cuda:0"),
    }


def test_a_mistake_is_an_error_that_says_what_was_expected_and_writes_nothing() -> None:
    for name, (changes, words) in _mistakes().items():
        good = {
            "out": torch.zeros(3, 256, dtype=FLOAT8, device="cuda"),
            "input": torch.randn(3, 512, device="cuda").half(),
            "scales": torch.zeros(3, 2, device="cuda"),
            "group_size": 128,
            "scale_ub": torch.tensor(1.0, device="cuda"),
            "is_scale_transposed": False,
        }
        arguments = {**good, **changes}
        before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        with pytest.raises(RuntimeError, match=f"silu_and_mul_per_block_quant: {words}"):
            silu_and_mul_per_block_quant(**arguments)
        assert all(torch.equal(arguments[key].float(), value.float()) for key, value in before.items()), name
        silu_and_mul_per_block_quant(**good)
