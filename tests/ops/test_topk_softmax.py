# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: which experts, in which order, with which weights; and clear errors."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.topk_softmax import topk_softmax  # noqa: E402

from .operation_checks import signature  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _route(gating: Any, topk: int, renormalize: bool = False, index: Any = torch.int32, **more: Any) -> tuple[Any, ...]:
    shape = (gating.shape[0], topk)
    weights, indices = torch.full(shape, -7.0), torch.full(shape, 77, dtype=index)
    places = torch.full(shape, -7, dtype=torch.int32)
    topk_softmax(weights, indices, places, gating, renormalize, **more)
    return weights, indices, places


def _expected(gating: Any, topk: int, renormalize: bool, bias: Any) -> tuple[list[list[float]], list[list[int]]]:
    """One expert at a time, in double precision: the first of the largest that is left."""
    weights, indices = [], []
    for row in gating.double().softmax(-1).tolist():
        left = dict(enumerate(row))
        chosen = []
        for _ in range(topk):
            chosen.append(max(left, key=lambda expert: left[expert] + (0 if bias is None else bias[expert].item())))
            del left[chosen[-1]]
        total = sum(row[expert] for expert in chosen) if renormalize else 1.0
        weights.append([row[expert] / total for expert in chosen])
        indices.append(chosen)
    return weights, indices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (8, 2), (60, 4), (64, 6), (128, 8), (384, 8)])
def test_it_agrees_with_the_definition(experts: int, topk: int, biased: bool, renormalize: bool, dtype: Any) -> None:
    # Far enough apart that double precision and the operation cannot disagree on an order, and twice each.
    logits = torch.stack([torch.randperm(experts) for _ in range(9)]).div(2, rounding_mode="floor") * 0.0625
    bias = torch.randperm(experts) * 0.5 if biased else None
    gating = logits.to(dtype)
    weights, indices, places = _route(gating, topk, renormalize, bias=bias)
    expected_weights, expected_indices = _expected(gating, topk, renormalize, bias)
    assert indices.tolist() == expected_indices
    torch.testing.assert_close(weights.double(), torch.tensor(expected_weights).double(), atol=1e-7, rtol=1e-6)
    assert places.tolist() == [[slot * 9 + token for slot in range(topk)] for token in range(9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [[1.0, NAN, 2.0, 3.0], [1.0, INF, 2.0, 3.0], [-INF] * 4, [NAN] * 4])
def test_a_row_that_is_no_distribution_gets_the_first_experts_once(broken: list[float], dtype: Any) -> None:
    gating = torch.tensor([broken, [0.0, 2.0, -0.0, 1.0]]).to(dtype)
    for renormalize in (False, True):
        weights, indices, _ = _route(gating, 3, renormalize)
        assert indices.tolist() == [[0, 1, 2], [1, 3, 0]]
        assert weights[0].tolist() == [0.0] * 3
        assert (weights[1] > 0).all()
    bias = torch.tensor([0.0, 1.0, 2.0, NAN])
    assert _route(gating, 4, bias=bias)[1][0].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_without_a_chance_come_last_and_the_lower_first(dtype: Any) -> None:
    gating = torch.tensor([[-INF, 1.0, -INF, 3.0, -INF]]).to(dtype)
    weights, indices, _ = _route(gating, 4)
    assert indices.tolist() == [[3, 1, 0, 2]]
    assert weights[0, 2:].tolist() == [0.0, 0.0]


def test_logits_of_16_bits_keep_apart_what_rounds_to_the_same_probability() -> None:
    logits = torch.tensor([[0.0, -300.0, -200.0]])
    assert _route(logits.half(), 3)[1].tolist() == [[0, 2, 1]]
    assert _route(logits, 3)[1].tolist() == [[0, 1, 2]]
    assert torch.equal(_route(logits.half(), 3)[0], _route(logits, 3)[0])


def test_padding_is_marked_in_the_indices_alone() -> None:
    gating = torch.randn(4, 8)
    padding = torch.tensor([False, True, False, True])
    for index, mark in ((torch.int32, -1), (torch.int64, -1), (torch.uint32, 2**32 - 1)):
        weights, indices, places = _route(gating, 2, index=index)
        marked = _route(gating, 2, index=index, is_padding=padding)
        assert marked[1].tolist() == [[mark] * 2 if padding[i] else indices[i].tolist() for i in range(4)]
        assert torch.equal(marked[0], weights)
        assert torch.equal(marked[2], places)


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(5, 24)
    found, expected = _route(wide[:, 3:11], 3), _route(wide[:, 3:11].contiguous(), 3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 8, 2), (3, 8, 0), (3, 0, 0)])
def test_nothing_to_choose_is_no_error(tokens: int, experts: int, topk: int) -> None:
    weights, _, _ = _route(torch.randn(tokens, experts), topk)
    assert weights.shape == (tokens, topk)


# In a process of its own that no patch and no test touches. Their order of the chosen is not defined, so that the
# weights are compared expert by expert.
AGAINST_VLLM = """
import itertools, json, torch
try:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import _softmax_topk
except ImportError:
    print("null")
    raise SystemExit
from vllm_hwplugin.ops.topk_softmax import topk_softmax

torch.manual_seed(1)
worst, compared = 0.0, 0
for (experts, topk), renormalize in itertools.product([(8, 2), (60, 4), (128, 8), (256, 8)], [False, True]):
    gating = torch.randn(33, experts) * 2
    weights, places = torch.empty(33, topk), torch.empty(33, topk, dtype=torch.int32)
    indices = torch.empty(33, topk, dtype=torch.int32)
    topk_softmax(weights, indices, places, gating, renormalize)
    theirs, their_indices = _softmax_topk(gating, topk, renormalize)
    ours = torch.zeros(33, experts).scatter(1, indices.long(), weights)
    worst = max(worst, float((ours - torch.zeros(33, experts).scatter(1, their_indices.long(), theirs)).abs().max()))
    compared += int((ours > 0).sum())
print(json.dumps([worst, compared]))
"""


@pytest.mark.slow
def test_it_is_what_vllm_computes_on_the_cpu() -> None:
    found = printed_beside_vllm(AGAINST_VLLM)
    if found is None:
        pytest.skip("this vLLM has no router of its own for the CPU")
    worst, compared = found
    assert compared == 33 * 2 * (2 + 4 + 8 + 8)
    assert worst < 1e-6


@pytest.mark.parametrize("last", ["", ", Tensor? is_padding"])
def test_the_schema_begins_as_vllms(last: str) -> None:
    """csrc/moe/torch_bindings.cpp of 0.20.2 and of 0.32.0, with the alias marks spelt out."""
    theirs = torch._C.parse_schema(
        "topk_softmax(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor(c!) token_expert_indices, "
        f"Tensor gating_output, bool renormalize, Tensor? bias{last}) -> ()"
    )
    ours = torch.ops.hwplugin.topk_softmax.default._schema
    expected = signature(theirs)
    assert signature(ours)[: len(expected)] == expected
    assert all(a.has_default_value() for a in ours.arguments[len(expected) :])
    assert not ours.returns


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
