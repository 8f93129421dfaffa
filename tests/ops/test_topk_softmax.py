# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: which experts, in which order, with which weights. tests/gpu has the same calls.

Logits are multiples of 1/8, so that many are equal and all others are far apart: then there is one right order, and the
lower of equal experts comes first. Weights may be off by 2^-20 of themselves. Results are poisoned before.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.topk_softmax import topk_softmax  # noqa: E402

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLACK = 2.0**-20


def _route(gating: Any, topk: int, renormalize: bool = False, index: Any = torch.int32, **more: Any) -> tuple[Any, ...]:
    shape = (gating.shape[0], topk)
    weights, indices = torch.full(shape, -7.0), torch.full(shape, 77, dtype=index)
    places = torch.full(shape, -7, dtype=torch.int32)
    topk_softmax(weights, indices, places, gating, renormalize, **more)
    return weights, indices, places


class Call:
    """Random arguments, and whether the operation makes of them what it has to.

    Args:
        shape: tokens, experts, topk.
        pitch: elements between the rows of logits.
        offset: elements before the first.
    """

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
        device: str = "cpu",
    ) -> None:
        tokens, experts, topk = shape
        self.device = device
        space = torch.empty(tokens * (experts + pitch) + offset, dtype=dtype, device=self.device)
        self.gating = space[offset:].view(tokens, experts + pitch)[:, :experts]
        self.weights = torch.empty(tokens, topk, device=self.device)
        self.indices = torch.empty(tokens, topk, dtype=index, device=self.device)
        self.places = torch.empty(tokens, topk, dtype=torch.int32, device=self.device)
        self.padding = torch.empty(tokens, dtype=torch.bool, device=self.device) if padded else None
        self.renormalize = renormalize

    def refill(self) -> None:
        self.gating.copy_(torch.randint(-40, 41, self.gating.shape, device=self.device) / 8)
        # Whole rows, and single experts, that cannot be compared.
        kind = torch.rand(len(self.gating), device=self.device)
        self.gating[kind < 0.10, 0] = NAN
        self.gating[kind < 0.05, 0] = INF
        self.gating[kind < 0.02] = -INF
        self.gating[kind > 0.9, ::2] = -INF
        if self.padding is not None:
            self.padding.copy_(torch.rand(len(self.padding), device=self.device) < 0.3)
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
        places = torch.arange(topk * tokens, dtype=torch.int32, device=self.device).view(topk, tokens).t()
        assert torch.equal(self.places, places)

    def signed_indices(self) -> Any:
        bits = self.indices.view(torch.int32) if self.indices.dtype == torch.uint32 else self.indices
        return bits.long()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64, torch.uint32])
def test_it_agrees_with_the_definition(index: Any, dtype: Any) -> None:
    shapes = ((1, 1, 1), (33, 8, 2), (64, 60, 4), (7, 128, 8), (33, 384, 8))
    for shape, renormalize, pitch in itertools.product(shapes, [False, True], [0, 3]):
        call = Call(shape, dtype, index=index, renormalize=renormalize, padded=renormalize, pitch=pitch)
        call.refill()
        call.check(call.run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_chooses_and_does_not_weigh(dtype: Any) -> None:
    gating = torch.tensor([[1.0, NAN, 2.0, 3.0], [0.0, 2.0, -0.0, 1.0]]).to(dtype)
    weights, indices, _ = _route(gating, 4, bias=torch.tensor([0.0, 1.0, 2.0, NAN]))
    assert indices.tolist() == [[2, 1, 0, 3]] * 2
    assert weights[0].tolist() == [0.0] * 4
    torch.testing.assert_close(weights[1], gating[1].float().softmax(-1)[indices[1].long()])


def test_logits_of_16_bits_keep_apart_what_rounds_to_the_same_probability() -> None:
    logits = torch.tensor([[0.0, -300.0, -200.0]])
    assert _route(logits.half(), 3)[1].tolist() == [[0, 2, 1]]
    assert _route(logits, 3)[1].tolist() == [[0, 1, 2]]
    assert torch.equal(_route(logits.half(), 3)[0], _route(logits, 3)[0])


def call_with(**changes: Any) -> dict[str, Any]:
    good = {
        "topk_weights": torch.full((5, 2), 7.0),
        "topk_indices": torch.full((5, 2), 7, dtype=torch.int32),
        "token_expert_indices": torch.full((5, 2), 7, dtype=torch.int32),
        "gating_output": torch.randn(5, 8),
        "renormalize": True,
        "bias": torch.randn(8),
        "is_padding": torch.zeros(5, dtype=torch.bool),
    }
    return {**good, **changes}


MISTAKES: list[dict[str, Any]] = [
    {"gating_output": torch.ones(5, 8).double()},
    {"gating_output": torch.ones(40)},
    {"gating_output": torch.ones(5, 16)[:, ::2]},
    {"gating_output": torch.ones(5, 1)},
    {"topk_weights": torch.ones(10)},
    {"topk_weights": torch.ones(5, 2).half()},
    {"topk_weights": torch.ones(4, 2)},
    {"topk_weights": torch.ones(2, 5).t()},
    {"topk_indices": torch.ones(5, 2)},
    {"topk_indices": torch.ones(5, 3, dtype=torch.int32)},
    {"token_expert_indices": torch.ones(5, 2, dtype=torch.int64)},
    {"bias": torch.ones(8).half()},
    {"bias": torch.ones(7)},
    {"is_padding": torch.zeros(5)},
    {"is_padding": torch.zeros(4, dtype=torch.bool)},
]

NOTHING: list[dict[str, Any]] = [
    {
        "topk_weights": torch.zeros(tokens, topk),
        "topk_indices": torch.zeros(tokens, topk, dtype=torch.int32),
        "token_expert_indices": torch.zeros(tokens, topk, dtype=torch.int32),
        "gating_output": torch.zeros(tokens, experts),
        "bias": None,
        "is_padding": None,
    }
    for tokens, experts, topk in ((0, 8, 2), (3, 8, 0), (3, 0, 0))
]
