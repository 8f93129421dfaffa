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
from vllm_hwplugin.ops.build.spec import KERNELS  # noqa: E402

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ODD = (*FLOATS, torch.float64)

Draw = random.Random


def tensor(draw: Draw, shape: Sequence[int], dtype: torch.dtype, *, odd: bool = False) -> torch.Tensor:
    """Of that shape: whole, or a slice of a wider one, or with its last dimension not dense."""
    width = draw.choice((0, 0, 16, 3)) if odd else 0
    step = draw.choice((1, 1, 1, 2)) if odd else 1
    offset = draw.choice((0, 0, 16, 1)) if odd and width else 0
    wide = torch.zeros([*shape[:-1], (shape[-1] + width) * step + offset])
    return wide.to(dtype)[..., offset : offset + shape[-1] * step : step]


def rotary_embedding(draw: Draw, odd: bool) -> tuple[Any, ...]:
    dtype = draw.choice(ODD if odd else FLOATS)
    lead = draw.choice(([5], [2, 3]))
    heads = [[draw.choice((1, 4)) * 64], [draw.choice((1, 4)), 64]][draw.randrange(2)]
    positions = torch.zeros(lead, dtype=draw.choice((torch.int64, torch.int32)) if odd else torch.int64)
    if odd and draw.random() < 0.2:
        positions = torch.zeros([*lead, 2], dtype=torch.int64)[..., 0]
    query = tensor(draw, [*lead, *heads], dtype, odd=odd)
    key = None if draw.random() < 0.3 else tensor(draw, [*lead, *heads], draw.choice(ODD) if odd else dtype, odd=odd)
    cache = torch.zeros(8, 32, dtype=draw.choice(ODD) if odd and draw.random() < 0.5 else dtype)
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


CALLS: dict[str, Callable[[Draw, bool], tuple[Any, ...]]] = {
    "rotary_embedding": rotary_embedding,
    "fused_qk_norm_rope": fused_qk_norm_rope,
    "merge_attn_states": merge_attn_states,
}


def test_every_kernel_has_such_calls() -> None:
    assert set(CALLS) == set(KERNELS)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_let_through_passes_the_kernels_checks(name: str) -> None:
    module = importlib.import_module(f"vllm_hwplugin.ops.{name}")
    supports = getattr(_override_support, name)
    seed = random.randrange(1 << 30)
    draw = Draw(seed)
    passed = 0
    for _ in range(400):
        args = CALLS[name](draw, True)
        if supports(*args):
            passed += 1
            try:
                module._reference(*args)
            except RuntimeError as error:
                shapes = [(a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
                pytest.fail(f"seed {seed}: let through, but {error}: {shapes}")
    assert 10 <= passed <= 390, f"seed {seed}: {passed} of 400 let through, so the calls tell nothing"


@pytest.mark.parametrize("name", CALLS)
def test_calls_as_vllm_makes_them_are_let_through(name: str) -> None:
    draw = Draw(0)
    supports = getattr(_override_support, name)
    assert all(supports(*CALLS[name](draw, False)) for _ in range(50))
