# SPDX-License-Identifier: Apache-2.0
"""A call that a predicate lets through is one that the kernel's own checks let through: many odd calls at random.

The references make the kernels' checks (their tests compare the two), so they stand for the kernels here.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin.ops import _override_support  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402
from vllm_hwplugin.ops.override_table import OPS  # noqa: E402

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ODD = (*FLOATS, torch.float64)

Draw = random.Random

# Of the oddest calls one in thirty is let through: so many that ten of them never fail to come.
TRIES = 2000


def tensor(draw: Draw, shape: Sequence[int], dtype: torch.dtype, *, odd: bool = False) -> torch.Tensor:
    """Of that shape: whole, a slice of a wider one, with its last dimension not dense, or elements that overlap."""
    width = draw.choice((0, 0, 0, 16, 4, 3)) if odd else 0
    step = draw.choice((1, 1, 1, 2)) if odd else 1
    offset = draw.choice((0, 0, 16, 1)) if odd and width else 0
    # Rows that are left out lie between the batches of the others.
    gap = draw.choice((0, 0, 1)) if odd and len(shape) > 1 else 0
    wide = torch.zeros([*shape[:-2], *(size + gap for size in shape[-2:-1]), (shape[-1] + width) * step + offset])
    part = wide.to(dtype)[..., offset : offset + shape[-1] * step : step]
    part = part[..., : shape[-2], :] if len(shape) > 1 else part
    if odd and draw.random() < 0.1:
        shared = draw.randrange(len(shape))
        return part.narrow(shared, 0, 1).expand(shape)
    return part


def rotary_embedding(draw: Draw, odd: bool) -> tuple[Any, ...]:
    dtype = draw.choice(ODD if odd else FLOATS)
    lead = draw.choice(([5], [2, 3]))
    # vLLM's kernel takes what has more dimensions for packed heads.
    size = draw.choice((64, 64, 128, 32)) if odd else 64
    heads = [[draw.choice((1, 4)) * size], [draw.choice((1, 4)), size]][draw.randrange(2)]
    if odd and draw.random() < 0.1:
        heads = draw.choice(([2, 2, size], []))
    positions = torch.zeros(lead, dtype=draw.choice((torch.int64, torch.int32)) if odd else torch.int64)
    if odd and draw.random() < 0.2:
        positions = torch.zeros([*lead, 2], dtype=torch.int64)[..., 0]
    query = tensor(draw, [*lead, *heads], dtype, odd=odd)
    key = None if draw.random() < 0.3 else tensor(draw, [*lead, *heads], draw.choice(ODD) if odd else dtype, odd=odd)
    of = draw.choice(ODD) if odd and draw.random() < 0.5 else draw.choice((dtype, FLOATS[0]))
    cache = tensor(draw, [8, 32], of, odd=odd and draw.random() < 0.3)
    return positions, query, key, 64, cache, draw.random() < 0.5, draw.choice((0, 32)), draw.random() < 0.5


def fused_qk_norm_rope(draw: Draw, odd: bool) -> tuple[Any, ...]:
    dtype = draw.choice(ODD if odd else FLOATS[1:])

    def other() -> torch.dtype:
        return draw.choice(ODD) if odd and draw.random() < 0.3 else dtype

    weights = (tensor(draw, [64], other(), odd=odd and draw.random() < 0.3) for _ in range(2))
    cache = tensor(draw, [8, 32], other(), odd=odd and draw.random() < 0.3)
    positions = torch.zeros(5, dtype=torch.int32 if odd and draw.random() < 0.2 else torch.int64)
    qkv = tensor(draw, [5, 8 * 64], dtype, odd=odd and draw.random() < 0.5)
    return qkv, 4, 2, 2, 64, 1e-6, *weights, cache, draw.random() < 0.5, positions, -1


def merge_attn_states(draw: Draw, odd: bool) -> tuple[Any, ...]:
    dtype = draw.choice(ODD if odd else FLOATS)
    scale = torch.ones(1) if draw.random() < 0.5 else None
    shape = [5, 3, draw.choice((64, 36)) if odd else 64]

    def part(of: torch.dtype) -> torch.Tensor:
        return tensor(draw, shape, draw.choice(ODD) if odd and draw.random() < 0.1 else of, odd=odd)

    def lse() -> torch.Tensor:
        return torch.zeros(3, 5, dtype=torch.float64 if odd and draw.random() < 0.1 else torch.float32)

    output = part(dtype if scale is None or (odd and draw.random() < 0.2) else torch.float8_e4m3fn)
    return output, draw.choice((None, lse())), part(dtype), lse(), part(dtype), lse(), draw.choice((None, 0, 4)), scale


def silu_and_mul_per_block_quant(draw: Draw, odd: bool) -> tuple[Any, ...]:
    tokens, groups, size = draw.choice((1, 2, 5)), draw.choice((1, 2, 5)), draw.choice((64, 128))
    dtype = draw.choice(ODD if odd and draw.random() < 0.3 else FLOATS[1:])
    out = tensor(draw, [tokens, groups * size], torch.float8_e4m3fn, odd=odd and draw.random() < 0.2)
    if draw.random() < 0.3:
        out = out.to(torch.uint8 if odd and draw.random() < 0.3 else torch.int8)
    transposed = draw.random() < 0.5
    shape = [groups, tokens] if transposed else [tokens, groups]
    scales = tensor(draw, shape, torch.float64 if odd and draw.random() < 0.1 else torch.float32, odd=odd)
    if transposed and not (odd and draw.random() < 0.3):
        scales = scales.t()
    bound = torch.ones(1) if out.dtype != torch.int8 and draw.random() < 0.5 else None
    return out, tensor(draw, [tokens, 2 * groups * size], dtype, odd=odd), scales, size, bound, transposed


def rms_norm_dynamic_per_token_quant(draw: Draw, odd: bool) -> tuple[Any, ...]:
    lead = draw.choice(([5], [2, 3]))
    dtype = draw.choice(ODD if odd and draw.random() < 0.3 else FLOATS)

    def other() -> torch.dtype:
        return draw.choice(ODD) if odd and draw.random() < 0.2 else dtype

    quantised = torch.uint8 if odd and draw.random() < 0.1 else draw.choice((torch.float8_e4m3fn, torch.int8))
    result = tensor(draw, [*lead, 64], quantised, odd=odd and draw.random() < 0.2)
    weight = tensor(draw, [64], other(), odd=odd and draw.random() < 0.3)
    scale = tensor(draw, [*lead, 1], torch.float64 if odd and draw.random() < 0.1 else torch.float32, odd=odd)
    residual = None if draw.random() < 0.5 else tensor(draw, [*lead, 64], other(), odd=odd and draw.random() < 0.3)
    return result, tensor(draw, [*lead, 64], dtype, odd=odd), weight, scale, 1e-6, None, residual


def topk_softmax(draw: Draw, odd: bool) -> tuple[Any, ...]:
    def of(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        wrong = torch.float64 if dtype.is_floating_point else torch.int16
        one = tensor(draw, shape, dtype, odd=odd and draw.random() < 0.2)
        return one.to(wrong) if odd and draw.random() < 0.05 else one

    tokens, longer = 5, 1 if odd and draw.random() < 0.1 else 0
    index = draw.choice((torch.int32, torch.int64))
    outputs = (
        of(torch.float32, [tokens + longer, 2]),
        of(index, [tokens + longer, 2]),
        of(torch.int32, [tokens + longer, 2]),
    )
    bias = of(torch.float32, [16]) if draw.random() < 0.5 else None
    padding = of(torch.bool, [tokens]) if draw.random() < 0.5 else None
    return *outputs, of(draw.choice(FLOATS), [tokens, 16]), draw.random() < 0.5, bias, padding


CALLS: dict[str, Callable[[Draw, bool], tuple[Any, ...]]] = {
    "rotary_embedding": rotary_embedding,
    "fused_qk_norm_rope": fused_qk_norm_rope,
    "merge_attn_states": merge_attn_states,
    "silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
    "rms_norm_dynamic_per_token_quant": rms_norm_dynamic_per_token_quant,
    "topk_softmax": topk_softmax,
}


def supports(name: str, *args: Any) -> bool:
    """As the dispatcher's kernel asks it: by the plugin's operation, with all arguments."""
    operation = getattr(importlib.import_module(f"vllm_hwplugin.ops.{name}"), name)
    parameters = [
        argument.name for argument in getattr(torch.ops.hwplugin, operation.__name__).default._schema.arguments
    ]
    return _override_support.predicate(name, parameters)(args)


def test_every_operation_has_a_kernel_and_such_calls() -> None:
    assert set(CALLS) == set(OPS)
    assert set(OPS) <= set(KERNELS)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_let_through_passes_the_kernels_checks(name: str) -> None:
    operation = getattr(importlib.import_module(f"vllm_hwplugin.ops.{name}"), name)
    seed = random.randrange(1 << 30)
    draw = Draw(seed)
    passed = 0
    for _ in range(TRIES):
        args = CALLS[name](draw, True)
        if supports(name, *args):
            passed += 1
            try:
                operation.__wrapped__(*args)
            except RuntimeError as error:
                shapes = [(a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
                pytest.fail(f"seed {seed}: let through, but {error}: {shapes}")
    assert 10 <= passed <= TRIES - 10, f"seed {seed}: {passed} of {TRIES} let through, so the calls tell nothing"


@pytest.mark.parametrize("name", CALLS)
def test_calls_as_vllm_makes_them_are_let_through(name: str) -> None:
    draw = Draw(0)
    assert all(supports(name, *CALLS[name](draw, False)) for _ in range(50))


def _merge(
    part: torch.Tensor,
    prefix: torch.Tensor | None = None,
    suffix: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    fitting = torch.zeros(part.shape[1], part.shape[0])
    prefix, suffix = (part if other is None else other for other in (prefix, suffix))
    return part, None, prefix, fitting if lse is None else lse, suffix, fitting, None, None


def _norm(input: torch.Tensor, scales: int = 6) -> tuple[Any, ...]:
    return input, _half(64), torch.zeros(scales, 1), 1e-6, None


def _topk(
    indices: int = 2, places: int = 2, bias: torch.Tensor | None = None, is_padding: torch.Tensor | None = None
) -> tuple[Any, ...]:
    numbers = (torch.zeros(2, width, dtype=torch.int32) for width in (indices, places))
    return torch.zeros(2, 2), *numbers, _half(2, 16), True, bias, is_padding


def _half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _rope(
    query: torch.Tensor, key: torch.Tensor | None, lead: tuple[int, ...] = (2, 3), cache: torch.Tensor | None = None
) -> tuple[Any, ...]:
    positions = torch.zeros(lead, dtype=torch.int64)
    return positions, query, key, 64, _half(8, 32) if cache is None else cache, True, 0, False


WHOLE, UNEVEN = _half(2, 3, 64), _half(2, 4, 64)[:, :3]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rotary_embedding", _rope(UNEVEN, WHOLE)),
        ("rotary_embedding", _rope(WHOLE, UNEVEN)),
        # vLLM's kernel takes more dimensions for packed heads, and other sizes of a head by its strides.
        ("rotary_embedding", _rope(_half(5, 2, 2, 64), None, (5,))),
        ("rotary_embedding", _rope(_half(5, 2, 128), None, (5,))),
        ("rotary_embedding", _rope(_half(5, 96), None, (5,))),
        ("rotary_embedding", _rope(_half(1, 128).expand(5, 128), None, (5,))),
        ("rotary_embedding", _rope(_half(5, 128), _half(1, 128).expand(5, 128), (5,))),
        ("rotary_embedding", _rope(_half(5, 128), None, (5,), _half(8, 64)[:, ::2])),
        ("merge_attn_states", (_half(1, 3, 64).expand(5, 3, 64), *_merge(_half(5, 3, 64))[1:])),
        ("merge_attn_states", (_half(5, 3, 64), torch.zeros(3, 1).expand(3, 5), *_merge(_half(5, 3, 64))[2:])),
        (
            "silu_and_mul_per_block_quant",
            (_half(5, 64).char(), _half(5, 128), torch.zeros(1).expand(5, 1), 64, None, False),
        ),
        ("merge_attn_states", _merge(_half(5, 3, 40)[..., :36])),
        ("merge_attn_states", _merge(_half(5, 3 * 64 + 4)[:, : 3 * 64].unflatten(1, (3, 64)))),
        ("merge_attn_states", _merge(_half(5 * 3 * 64 + 1)[1:].view(5, 3, 64))),
        ("silu_and_mul_per_block_quant", (_half(1, 5, 64).char(), _half(5, 128), torch.zeros(5, 1), 64, None, False)),
        ("silu_and_mul_per_block_quant", (_half(5, 64).char(), _half(1, 5, 128), torch.zeros(5, 1), 64, None, False)),
        ("silu_and_mul_per_block_quant", (_half(5, 64).char(), _half(5, 128), torch.zeros(5, 2), 64, None, False)),
        ("rms_norm_dynamic_per_token_quant", (WHOLE.char(), UNEVEN, _half(64), torch.zeros(6, 1), 1e-6, None, None)),
        # Of other sizes, which vLLM's kernels take without a look: each reads and writes by the sizes of one tensor.
        ("silu_and_mul_per_block_quant", (_half(6, 64).char(), _half(5, 128), torch.zeros(6, 1), 64, None, False)),
        ("silu_and_mul_per_block_quant", (_half(5, 64).char(), _half(5, 128), torch.zeros(5, 1), 0, None, False)),
        ("silu_and_mul_per_block_quant", (_half(5, 64).char(), _half(5, 128), torch.zeros(5, 2), 32, None, False)),
        ("merge_attn_states", _merge(_half(5, 3, 64), prefix=_half(4, 3, 64))),
        ("merge_attn_states", _merge(_half(5, 3, 64), suffix=_half(6, 3, 64))),
        ("merge_attn_states", _merge(_half(5, 3, 64), lse=torch.zeros(3, 6))),
        ("merge_attn_states", _merge(_half(5, 3, 64, 64))),
        ("rms_norm_dynamic_per_token_quant", (WHOLE.view(6, 64).char(), *_norm(WHOLE), None)),
        ("rms_norm_dynamic_per_token_quant", (WHOLE.char(), *_norm(WHOLE, scales=7), None)),
        ("rms_norm_dynamic_per_token_quant", (WHOLE.char(), *_norm(WHOLE), WHOLE.view(6, 64))),
        ("topk_softmax", _topk(indices=3)),
        ("topk_softmax", _topk(places=3)),
        ("topk_softmax", _topk(bias=torch.zeros(17))),
        ("topk_softmax", _topk(is_padding=torch.zeros(3, dtype=torch.bool))),
        ("topk_softmax", _topk(is_padding=torch.zeros(4, dtype=torch.bool)[::2])),
        (
            "topk_softmax",
            (torch.zeros(2, 2), *(torch.zeros(2, 2, dtype=torch.int32),) * 2, _half(2, 1, 16), True, None, None),
        ),
    ],
)
def test_calls_that_chance_rarely_makes_go_to_vllms_kernel(name: str, args: tuple[Any, ...]) -> None:
    assert supports(name, *args) is False


def test_the_same_calls_with_fitting_sizes_are_let_through() -> None:
    quantised = _half(5, 64).char(), _half(5, 128), torch.zeros(5, 1), 64, None, False
    assert supports("silu_and_mul_per_block_quant", *quantised)
    assert supports("merge_attn_states", *_merge(_half(5, 3, 64)))
    assert supports("rms_norm_dynamic_per_token_quant", WHOLE.char(), *_norm(WHOLE), WHOLE)
    padding = torch.zeros(2, dtype=torch.bool)
    assert supports("topk_softmax", *_topk(bias=torch.zeros(16), is_padding=padding))


def test_rows_apart_are_let_through() -> None:
    apart = _half(5, 80)[:, :64]
    args = (_half(5, 64).char(), apart, _half(64), torch.zeros(5, 1), 1e-6, None, None)
    assert supports("rms_norm_dynamic_per_token_quant", *args)
    assert supports("rotary_embedding", *_rope(WHOLE, None))
