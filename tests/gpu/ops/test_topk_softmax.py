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

from vllm_hwplugin.ops.topk_softmax import topk_softmax  # noqa: E402

from ...ops import test_topk_softmax as calls  # noqa: E402
from ...ops.test_topk_softmax import DTYPES, SLACK  # noqa: E402
from .kernel_checks import check_in, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
Call = partial(calls.Call, device=DEVICE)

# Tokens, experts, topk. The kernel takes other paths above 2048 tokens, and above 1024 experts.
SHAPES = [
    (1, 128, 8), (64, 128, 8), (3001, 128, 8), (7, 8, 2), (4099, 8, 2), (33, 16, 4), (4099, 16, 4), (33, 32, 4),
    (4097, 32, 32), (64, 60, 4), (3001, 60, 4), (64, 64, 6), (5000, 64, 6), (17, 160, 6), (2500, 160, 6), (33, 256, 8),
    (4000, 256, 8), (64, 384, 8), (2500, 384, 8), (33, 512, 10), (9, 896, 8), (5, 1024, 40), (4, 1500, 9), (3, 1, 1),
    (3, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_definition(shape: tuple[int, int, int], mode: str) -> None:
    for dtype, renormalize in itertools.product(DTYPES, [False, True]):
        check_in(mode, Call(shape, dtype, renormalize=renormalize, padded=renormalize))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.uint32])
def test_every_index_type_and_layout(index: Any, dtype: Any) -> None:
    for shape, (pitch, offset) in itertools.product(SHAPES, [(0, 0), (0, 1), (3, 0), (16, 8)]):
        call = Call(shape, dtype, index=index, pitch=pitch, offset=offset, padded=True)
        call.refill()
        call.check(call.run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_chooses_and_does_not_weigh(shape: tuple[int, int, int], dtype: Any) -> None:
    tokens, experts, topk = shape
    call = Call(shape, dtype, renormalize=True)
    gating = torch.randn(tokens, experts, device=DEVICE).to(dtype)
    bias = torch.randn(experts, device=DEVICE)
    call.poison()
    topk_softmax(call.weights, call.indices, call.places, gating, True, bias)
    probabilities = gating.double().softmax(-1)
    chosen = call.indices.long()
    scores = probabilities + bias.double()
    # In the order of the scores, as far as float32 tells them apart, and no expert twice.
    best = scores.topk(topk, dim=-1).values
    assert bool(((scores.gather(1, chosen) - best).abs() <= SLACK * (1 + best.abs())).all())
    assert bool((chosen.sort(dim=-1).values.diff(dim=-1) > 0).all())
    weights = probabilities.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    assert bool(((call.weights.double() - weights).abs() <= SLACK * weights).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_experts_alone_and_among_many(dtype: Any) -> None:
    many = Call((5000, 128, 8), dtype)
    many.gating.copy_(torch.randn(5000, 128, device=DEVICE))
    many.run()
    for token in (0, 1234, 4999):
        alone = Call((1, 128, 8), dtype)
        alone.gating.copy_(many.gating[token : token + 1])
        alone.run()
        assert torch.equal(alone.indices[0], many.indices[token])
        torch.testing.assert_close(alone.weights[0], many.weights[token], atol=0, rtol=SLACK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_vllms_kernel(dtype: Any) -> None:
    theirs = vllms("topk_softmax", "_moe_C")
    more = [None] * (len(theirs._schema.arguments) - 6)
    for shape, renormalize in itertools.product(SHAPES, [False, True]):
        call = Call(shape, dtype, renormalize=renormalize)
        call.refill()
        theirs(call.weights, call.indices, call.places, call.gating.contiguous(), renormalize, None, *more)
        weights, indices, places = call.weights.clone(), call.indices.clone(), call.places.clone()
        call.poison()
        call.check(call.run)
        assert torch.equal(call.indices, indices), shape
        assert torch.equal(call.places, places), shape
        torch.testing.assert_close(call.weights, weights, atol=0, rtol=4 * SLACK)
