"""Gain or loss, as the table of overrides has to have it."""

from __future__ import annotations

import pytest

from benchmarks.pages import verdicts
from vllm_hwplugin_lab.bench.micro import op_cases as cases

OP = "topk_softmax"


def verdict(kernels, seconds, change=lambda made: None):
    made = kernels("ops", seconds)
    change(made)
    return verdicts(made)[OP]


def ours(factor):
    """vLLM takes 1 ms; ours takes that by `factor(case)`."""
    return lambda kernel, case: 1e-3 / factor(case) if kernel == cases.OURS else 1e-3


def test_faster_everywhere_is_a_gain(kernels):
    found = verdict(kernels, ours(lambda case: 1.2))
    assert (found.verdict, found.why, found.device, found.vllm) == ("gain", "", "NVIDIA H200", "0.26.0")
    assert found.ratios == {"small": pytest.approx(1.2), "large": pytest.approx(1.2)}


@pytest.mark.parametrize("ratio", [1.0, 1.03, 0.99])
def test_three_percent_are_no_gain(kernels, ratio):
    assert verdict(kernels, ours(lambda case: ratio)).verdict == "loss"
    assert verdict(kernels, ours(lambda case: 1.031)).verdict == "gain"


@pytest.mark.parametrize(("tokens", "size"), [((1, 8, 64), "small"), ((8192, 65536), "large")])
def test_no_gain_in_one_size_class_is_a_loss(kernels, tokens, size):
    few = tuple(f" t{n}" for n in tokens)
    found = verdict(kernels, ours(lambda case: 1.0 if case.endswith(few) else 3.0))
    assert found.verdict == "loss"
    assert found.why == f"{size} sizes run at 1.00 of vLLM's speed, which is no gain"


def test_a_shape_that_is_slower_is_a_loss_though_the_mean_gains(kernels):
    found = verdict(kernels, ours(lambda case: 0.9 if case == "topk_softmax 6 of 64 t8" else 2.0))
    assert (found.verdict, found.why) == ("loss", "6 of 64 with 8 tokens runs at 0.90 of vLLM's speed")


@pytest.mark.parametrize("side", [cases.OURS, cases.VLLM])
def test_what_was_not_measured_is_no_gain(kernels, side):
    def seconds(kernel, case):
        return None if (kernel, case) == (side, "topk_softmax 8 of 128 t1") else ours(lambda _: 2.0)(kernel, case)

    found = verdict(kernels, seconds)
    assert (found.verdict, found.why) == ("loss", "8 of 128 with 1 tokens was not measured on both sides")
