"""Gain or loss, as the table of overrides has to have it."""

from __future__ import annotations

import pytest

from vllm_hwplugin.bench.micro import _op_cases as cases
from vllm_hwplugin.bench.micro import _verdict

OP = "topk_softmax"


def verdict(results, seconds, change=lambda made: None):
    made = results("ops", seconds)
    change(made)
    return _verdict.verdicts(made)[OP]


def ours(factor):
    """vLLM takes 1 ms; ours takes that by `factor(case)`."""
    return lambda kernel, case: 1e-3 / factor(case) if kernel == cases.OURS else 1e-3


def test_faster_everywhere_is_a_gain(results):
    found = verdict(results, ours(lambda case: 1.2))
    assert (found.verdict, found.why, found.device, found.vllm) == ("gain", "", "NVIDIA H200", "0.26.0")
    assert found.ratios == {"small": pytest.approx(1.2), "large": pytest.approx(1.2)}


@pytest.mark.parametrize("ratio", [1.0, 1.03, 0.99])
def test_three_percent_are_no_gain(results, ratio):
    assert verdict(results, ours(lambda case: ratio)).verdict == "loss"
    assert verdict(results, ours(lambda case: 1.031)).verdict == "gain"


@pytest.mark.parametrize(("tokens", "size"), [((1, 8, 64), "small"), ((8192, 65536), "large")])
def test_no_gain_in_one_size_class_is_a_loss(results, tokens, size):
    few = tuple(f" t{n}" for n in tokens)
    found = verdict(results, ours(lambda case: 1.0 if case.endswith(few) else 3.0))
    assert found.verdict == "loss"
    assert found.why == f"{size} sizes run at 1.00 of vLLM's speed, which is no gain"


def test_a_shape_that_is_slower_is_a_loss_though_the_mean_gains(results):
    found = verdict(results, ours(lambda case: 0.9 if case == "topk_softmax 6 of 64 t8" else 2.0))
    assert (found.verdict, found.why) == ("loss", "6 of 64 with 8 tokens runs at 0.90 of vLLM's speed")


@pytest.mark.parametrize("side", [cases.OURS, cases.VLLM])
def test_what_was_not_measured_is_no_gain(results, side):
    def seconds(kernel, case):
        return None if (kernel, case) == (side, "topk_softmax 8 of 128 t1") else ours(lambda _: 2.0)(kernel, case)

    found = verdict(results, seconds)
    assert (found.verdict, found.why) == ("loss", "8 of 128 with 1 tokens was not measured on both sides")


@pytest.mark.parametrize("faster", [cases.VLLM, cases.VLLM_FLOAT32])
def test_the_faster_way_of_calling_vllms_operation_counts(results, faster):
    def seconds(kernel, case):
        return {cases.OURS: 1e-3, faster: 1.5e-3}.get(kernel, 9e-3)

    found = _verdict.verdicts(results("ops", seconds))["rotary_embedding"]
    assert found.ratios == {"small": pytest.approx(1.5), "large": pytest.approx(1.5)}


def test_both_ways_have_to_be_measured(results):
    def seconds(kernel, case):
        return None if kernel == cases.VLLM_FLOAT32 else 1e-3 if kernel == cases.OURS else 2e-3

    found = _verdict.verdicts(results("ops", seconds))
    assert (found["rotary_embedding"].verdict, found[OP].verdict) == ("loss", "gain")
    assert "was not measured on both sides" in found["rotary_embedding"].why


def test_a_wrong_answer_is_no_gain(results):
    def change(made):
        for cell in made["cells"]:
            if (cell["kernel"], cell["case"]) == (cases.OURS, "topk_softmax 8 of 128 t1"):
                cell["mismatch"] = "weights are wrong"

    found = verdict(results, ours(lambda case: 2.0), change)
    assert (found.verdict, found.why) == ("loss", "8 of 128 with 1 tokens is wrong: weights are wrong")


def test_the_file_of_a_run_holds_the_verdicts(results):
    made = results("ops", ours(lambda case: 2.0 if case.startswith(OP) else 1.0))
    found = {one["op"]: one for one in made["verdicts"]}
    assert set(found) == set(cases.OPS)
    assert found[OP] == {
        "op": OP,
        "device": "NVIDIA H200",
        "vllm": "0.26.0",
        "verdict": "gain",
        "ratios": {"small": 2.0, "large": 2.0},
        "why": "",
    }
    assert found["merge_attn_states"]["verdict"] == "loss"
