"""Times and parity of operations, on the CPU: the plugin's references are both sides there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_hwplugin.ops.compile import torch_build
from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro import _ops_bench
from vllm_hwplugin_lab.bench.micro._ops_bench import OpsBench
from vllm_hwplugin_lab.bench.micro._timer import Copies, Missing

CASE = "merge_attn_states 8 heads of 128 t8"


@pytest.fixture
def bench(fake_timer, quick, monkeypatch):
    monkeypatch.setattr(_ops_bench, "implementation", lambda kernel, op: _ops_bench.reference(op))
    timer = fake_timer()
    return OpsBench(timer, Copies(timer), 0)


def test_a_right_operation_has_no_mismatch(bench):
    facts = bench.measure(cases.OURS, CASE)
    assert (facts["mismatch"], facts["sets"], facts["eager"]) == (None, 2, None)
    assert set(facts) >= {"seconds", "copy_seconds", "launches"}


def test_a_wrong_operation_is_timed_and_says_where(bench, monkeypatch):
    def wrong(output, *rest):
        torch.ops.hwplugin.merge_attn_states(output, *rest)
        output[3, 7, 1] += 1

    wrong.default = torch.ops.hwplugin.merge_attn_states.default
    monkeypatch.setattr(_ops_bench, "implementation", lambda kernel, op: wrong)
    facts = bench.measure(cases.VLLM, CASE)
    assert facts["mismatch"].startswith("output: 1 of 8192")
    assert facts["seconds"] >= 0


def test_ours_is_missing_where_its_kernel_is_and_says_why(monkeypatch):
    # Without its kernel the reference would run: that is no figure of the kernel.
    cpu = dataclasses.replace(torch_build.installed(), cuda=None, musa=None)
    monkeypatch.setattr(torch_build, "installed", lambda: cpu)
    with pytest.raises(Missing, match="is a CPU build"):
        _ops_bench.implementation(cases.OURS, "topk_softmax")


def test_vllms_operation_is_looked_for_where_its_libraries_define_it(monkeypatch):
    monkeypatch.setattr(_ops_bench, "needed", lambda module: None)
    with pytest.raises(Missing, match="this vLLM has no operation no_such_operation"):
        _ops_bench.implementation(cases.VLLM, "no_such_operation")
    library = torch.library.Library("_moe_C", "FRAGMENT")
    library.define("of_a_test(Tensor a) -> Tensor")
    assert _ops_bench.implementation(cases.VLLM, "of_a_test") is torch.ops._moe_C.of_a_test


def test_arguments_that_a_later_vllm_added_are_none():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("with_more(Tensor a, bool b, Tensor? c, Tensor? d=None) -> ()")
    library.define("with_a_number(Tensor a, int b) -> ()")
    assert _ops_bench.trailing(torch.ops._C.with_more, 2) == [None]
    assert _ops_bench.trailing(torch.ops._C.with_more, 3) == []
    with pytest.raises(ValueError, match="also needs b"):
        _ops_bench.trailing(torch.ops._C.with_a_number, 1)
