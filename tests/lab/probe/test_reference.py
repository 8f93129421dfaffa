# SPDX-License-Identifier: Apache-2.0
"""The reference against attention written out element by element, and what its measure notices."""

from __future__ import annotations

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin_lab.probe import Case, Plain, Request, draw, trials  # noqa: E402
from vllm_hwplugin_lab.probe.inputs import SPARE_BLOCKS, make_inputs, poison  # noqa: E402
from vllm_hwplugin_lab.probe.reference import answers, measure  # noqa: E402

REQUESTS = (Request(3, 4), Request(1, 9), Request(5, 0))
CASE = Case(REQUESTS, "float32", "auto", 8, 4, 2, 4, seed=5)
VARIANTS = {
    "causal": {},
    "non_causal": {"causal": False},
    "window": {"sliding_window": 3},
    "non_causal_window": {"causal": False, "sliding_window": 3, "window_ahead": 1},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
}


def reference(case, inputs):
    """The right answer: float64 ``[num_tokens, num_heads, head_size]``."""
    return torch.cat([one.right for one in answers(case, inputs)])


def by_hand(case, inputs):
    """One query, one head, one key at a time."""
    rows = []
    start = 0
    for number, request in enumerate(case.requests):
        for token in range(request.query):
            at = request.context + token
            for head in range(case.num_heads):
                shared = head // (case.num_heads // case.num_kv_heads)
                weights, values = [], []
                for other in range(request.total):
                    if case.causal and other > at:
                        continue
                    if case.sliding_window is not None and at - other >= case.sliding_window:
                        continue
                    if case.window_ahead is not None and other - at > case.window_ahead:
                        continue
                    score = float(
                        inputs.query[start + token, head].double() @ inputs.keys[number][other, shared].double()
                    ) / math.sqrt(case.head_size)
                    if case.softcap is not None:
                        score = case.softcap * math.tanh(score / case.softcap)
                    if case.alibi:
                        score += 2 ** (-8 * (head + 1) / case.num_heads) * (other - at)
                    weights.append(math.exp(score))
                    values.append(inputs.values[number][other, shared].double())
                total = sum(weights) + (math.exp(float(inputs.sinks[head])) if case.sinks else 0)
                rows.append(sum(w / total * v for w, v in zip(weights, values, strict=True)))
        start += request.query
    return torch.stack(rows).view(case.num_tokens, case.num_heads, case.head_size)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_reference_is_attention_and_its_answer_in_the_cases_dtype_passes(changes):
    case = dataclasses.replace(CASE, **changes)
    inputs = make_inputs(case, "cpu")
    right = reference(case, inputs)
    torch.testing.assert_close(right, by_hand(case, inputs), rtol=1e-9, atol=1e-9)
    for dtype in ("float32", "bfloat16", "float16"):
        case = dataclasses.replace(case, dtype=dtype)
        inputs = make_inputs(case, "cpu")
        assert measure(case, inputs, reference(case, inputs).to(getattr(torch, dtype))).ratio <= 1.1


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "causal"])
def test_an_answer_that_ignores_a_capability_is_seen_on_every_trial(name):
    """Also in the batches that the probe itself draws, and in a 16-bit dtype."""
    capability = {"window": "sliding_window"}.get(name, name)
    trial = next(one for one in trials() if one.capability == capability)
    off = {"causal": True, "sliding_window": None, "softcap": None, "sinks": False, "alibi": False}
    for case in draw(trial, Plain("bfloat16", 64, 16, longest=60), 11, 5):
        inputs = make_inputs(case, "cpu")
        without = dataclasses.replace(inputs, sinks=None, alibi_slopes=None)
        ignored = reference(dataclasses.replace(case, **off), without).to(torch.bfloat16)
        assert measure(case, inputs, ignored).ratio > 4, case


def test_one_wrong_element_is_seen_and_named_by_its_request_and_one_never_written_is_infinitely_wrong():
    case = dataclasses.replace(CASE, dtype="bfloat16")
    inputs = make_inputs(case, "cpu")
    answer = reference(case, inputs).to(torch.bfloat16)
    answer[3, 2, 1] += 0.5
    found = measure(case, inputs, answer)
    assert found.ratio > 4
    assert found.request == 1
    answer[-1] = math.nan
    found = measure(case, inputs, answer)
    assert (found.ratio, found.request) == (math.inf, 2)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_a_float8_cache_may_round_to_nearest_and_no_worse(name):
    case = Case((Request(4, 60), Request(1, 200)), "bfloat16", name, 64, 4, 2, 16, seed=8)
    inputs = make_inputs(case, "cpu")
    float8 = torch.float8_e5m2 if name.endswith("e5m2") else torch.float8_e4m3fn

    def answer(rounded):
        held = dataclasses.replace(
            inputs, keys=tuple(map(rounded, inputs.keys)), values=tuple(map(rounded, inputs.values))
        )
        return measure(case, inputs, reference(case, held).to(torch.bfloat16)).ratio

    def towards_zero(tensor):
        nearest = tensor.to(float8)
        above = nearest.float().abs() > tensor.float().abs()
        return (nearest.view(torch.uint8) - above.to(torch.uint8)).view(float8).to(tensor.dtype)

    assert answer(lambda tensor: tensor.to(float8).to(tensor.dtype)) < 1.2
    assert answer(towards_zero) > 2


def test_slots_and_block_table_agree_and_the_rest_of_the_table_is_of_spare_blocks():
    case = dataclasses.replace(CASE, padding=2)
    inputs = make_inputs(case, "cpu")
    used, beyond = set(), set()
    for row, (request, slots) in enumerate(zip(case.requests, inputs.slots, strict=True)):
        blocks = -(-request.total // case.block_size)
        table = inputs.block_table[row].tolist()
        assert slots.tolist() == [table[i // 4] * 4 + i % 4 for i in range(request.total)]
        used |= set(table[:blocks])
        beyond |= set(table[blocks:])
    assert len(used) == inputs.num_blocks - 1 - SPARE_BLOCKS
    assert beyond
    assert not beyond & used
    assert 0 not in used
    assert inputs.block_table[len(case.requests) :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_poison_is_finite_everywhere_and_far_from_any_key(dtype):
    cache = torch.empty(7, 2, 16, 32, dtype=dtype).permute(0, 2, 1, 3)
    poison(cache, 3)
    held = [cache] if dtype != torch.uint8 else [cache.view(torch.float8_e4m3fn), cache.view(torch.float8_e5m2)]
    for one in held:
        assert one.float().isfinite().all()
        assert one.float().abs().max() > 40
