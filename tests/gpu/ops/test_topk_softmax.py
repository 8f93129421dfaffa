# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU, against the definition in float64 and against the installed vLLM's own kernel.

Logits are multiples of 1/8, so that many are equal and all others are far apart: then there is one right order, and the
lower of equal experts comes first. Weights may be off by 2^-20 of themselves. Inputs are random anew in every run; a
failure shows the seed. Results are poisoned before.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import TOPK_SOFTMAX  # noqa: E402
from vllm_hwplugin.ops.topk_softmax import topk_softmax  # noqa: E402

from .kernel_checks import captured, load_kernel, vllms  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SLACK = 2.0**-20
REPLAYS = 32
INF, NAN = float("inf"), float("nan")

# Tokens, experts, topk. The kernel takes other paths above 2048 tokens, and above 1024 experts.
SHAPES = [
    (1, 128, 8), (64, 128, 8), (3001, 128, 8), (7, 8, 2), (4099, 8, 2), (33, 16, 4), (4099, 16, 4), (33, 32, 4),
    (4097, 32, 32), (64, 60, 4), (3001, 60, 4), (64, 64, 6), (5000, 64, 6), (17, 160, 6), (2500, 160, 6), (33, 256, 8),
    (4000, 256, 8), (64, 384, 8), (2500, 384, 8), (33, 512, 10), (9, 896, 8), (5, 1024, 40), (4, 1500, 9), (3, 1, 1),
    (3, 5, 5),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    load_kernel(TOPK_SOFTMAX)


class Call:
    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: Any,
        *,
        renormalize: bool = False,
        index: Any = torch.int32,
        padded: bool = False,
        pitch: int = 0,
        offset: int = 0,
    ) -> None:
        tokens, experts, topk = shape
        space = torch.empty(tokens * (experts + pitch) + offset, dtype=dtype, device=DEVICE)
        self.gating = space[offset:].view(tokens, experts + pitch)[:, :experts]
        self.weights = torch.empty(tokens, topk, device=DEVICE)
        self.indices = torch.empty(tokens, topk, dtype=index, device=DEVICE)
        self.places = torch.empty(tokens, topk, dtype=torch.int32, device=DEVICE)
        self.padding = torch.empty(tokens, dtype=torch.bool, device=DEVICE) if padded else None
        self.renormalize = renormalize

    def refill(self) -> None:
        self.gating.copy_(torch.randint(-40, 41, self.gating.shape, device=DEVICE) / 8)
        # Whole rows, and single experts, that cannot be compared.
        kind = torch.rand(len(self.gating), device=DEVICE)
        self.gating[kind < 0.10, 0] = NAN
        self.gating[kind < 0.05, 0] = INF
        self.gating[kind < 0.02] = -INF
        self.gating[kind > 0.9, ::2] = -INF
        if self.padding is not None:
            self.padding.copy_(torch.rand(len(self.padding), device=DEVICE) < 0.3)
        self.poison()

    def poison(self) -> None:
        self.weights.fill_(NAN)
        self.indices.fill_(12345)
        self.places.fill_(-12345)

    def run(self) -> None:
        topk_softmax(
            self.weights, self.indices, self.places, self.gating, self.renormalize, None, self.padding
        )  # fmt: skip

    def check(self, run: Any) -> None:
        run()
        tokens, topk = self.weights.shape
        probabilities = self.gating.double().softmax(-1)
        broken = probabilities.isnan().any(-1, keepdim=True)
        probabilities = probabilities.masked_fill(broken, 0.0)
        logits = self.gating.double().masked_fill(broken, 0.0)
        chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        weights = probabilities.gather(1, chosen)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1.0)
        if self.padding is not None:
            chosen = chosen.masked_fill(self.padding[:, None], -1)
        assert torch.equal(self.signed_indices(), chosen)
        assert bool(((self.weights.double() - weights).abs() <= SLACK * weights).all())
        places = torch.arange(topk * tokens, dtype=torch.int32, device=DEVICE).view(topk, tokens).t()
        assert torch.equal(self.places, places)

    def signed_indices(self) -> Any:
        bits = self.indices.view(torch.int32) if self.indices.dtype == torch.uint32 else self.indices
        return bits.long()


@pytest.mark.parametrize("mode", ["eager", "captured", "replayed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_definition(shape: tuple[int, int, int], mode: str) -> None:
    for dtype, renormalize in itertools.product(DTYPES, [False, True]):
        call = Call(shape, dtype, renormalize=renormalize, padded=renormalize)
        run = call.run if mode == "eager" else captured(call)
        for _ in range(REPLAYS if mode == "replayed" else 1):
            call.refill()
            call.check(run)


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


def _arguments(**changes: Any) -> list[Any]:
    good = {
        "topk_weights": torch.empty(5, 2, device=DEVICE),
        "topk_indices": torch.empty(5, 2, dtype=torch.int32, device=DEVICE),
        "token_expert_indices": torch.empty(5, 2, dtype=torch.int32, device=DEVICE),
        "gating_output": torch.randn(5, 8, device=DEVICE),
        "renormalize": True,
        "bias": torch.randn(8, device=DEVICE),
        "is_padding": torch.zeros(5, dtype=torch.bool, device=DEVICE),
    }
    return list({**good, **changes}.values())


def _ones(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(*shape, dtype=dtype, device=DEVICE)


MISTAKES: dict[str, Any] = {
    "gating_output is Double": lambda: {"gating_output": _ones(5, 8, dtype=torch.float64)},
    "gating_output has 1 dimensions": lambda: {"gating_output": _ones(40)},
    "gating_output has stride 2": lambda: {"gating_output": _ones(5, 16)[:, ::2]},
    "topk is 2; expected at most the number of experts, 1": lambda: {"gating_output": _ones(5, 1)},
    "topk_weights is not on gating_output's device": lambda: {"topk_weights": torch.empty(5, 2)},
    "topk_weights has 1 dimensions": lambda: {"topk_weights": _ones(10)},
    "topk_weights is Half": lambda: {"topk_weights": _ones(5, 2, dtype=torch.float16)},
    "the shape of topk_weights is not": lambda: {"topk_weights": _ones(4, 2)},
    "topk_weights is not contiguous": lambda: {"topk_weights": _ones(2, 5).t()},
    "topk_indices is Float": lambda: {"topk_indices": _ones(5, 2)},
    "the shape of topk_indices is not": lambda: {"topk_indices": _ones(5, 3, dtype=torch.int32)},
    "token_expert_indices is Long": lambda: {"token_expert_indices": _ones(5, 2, dtype=torch.int64)},
    "bias is Half": lambda: {"bias": _ones(8, dtype=torch.float16)},
    "bias has to be contiguous": lambda: {"bias": _ones(7)},
    "is_padding is Float": lambda: {"is_padding": _ones(5)},
    "is_padding is not on gating_output's device": lambda: {"is_padding": torch.zeros(5, dtype=torch.bool)},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_was_expected(words: str) -> None:
    with pytest.raises(RuntimeError, match=f"topk_softmax: .*{words}"):
        topk_softmax(*_arguments(**MISTAKES[words]()))
    topk_softmax(*_arguments())


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 8, 2), (3, 8, 0), (3, 0, 0)])
def test_nothing_to_choose_is_no_error(tokens: int, experts: int, topk: int) -> None:
    call = Call((tokens, experts, topk), torch.float32)
    call.poison()
    call.run()
    assert call.weights.shape == (tokens, topk)
