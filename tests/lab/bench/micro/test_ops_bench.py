"""Times and parity of operations, on the CPU: the plugin's references are both sides there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_hwplugin.ops.compile import torch_build
from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro import _op_kernels
from vllm_hwplugin_lab.bench.micro._ops_bench import OpsBench
from vllm_hwplugin_lab.bench.micro._timer import Copies, Missing

CASE = "rotary_embedding 4/1 heads of 128 t8"


@pytest.fixture
def bench(fake_timer, quick, monkeypatch):
    monkeypatch.setattr(_op_kernels, "implementation", lambda kernel, op: _op_kernels.reference(op))
    timer = fake_timer()
    return OpsBench(timer, Copies(timer), 0)


def test_a_right_operation_has_no_mismatch(bench):
    facts = bench.measure(cases.OURS, CASE)
    assert (facts["mismatch"], facts["sets"], facts["eager"]) == (None, 2, None)
    assert set(facts) >= {"seconds", "copy_seconds", "launches"}


def test_a_wrong_operation_is_timed_and_says_where(bench, monkeypatch):
    def wrong(positions, query, *rest):
        torch.ops.hwplugin.rotary_embedding(positions, query, *rest)
        query[3, 7] += 1

    wrong.default = torch.ops.hwplugin.rotary_embedding.default
    monkeypatch.setattr(_op_kernels, "implementation", lambda kernel, op: wrong)
    assert bench.measure(cases.VLLM, CASE)["mismatch"].startswith("query: 1 of 4096")


def test_the_table_is_converted_before_the_clock_starts_and_only_for_the_side_that_says_so(bench, monkeypatch):
    seen = []

    def spy(positions, query, key, head, table, neox):
        seen.append(table.dtype)
        torch.ops.hwplugin.rotary_embedding(positions, query, key, head, table, neox)

    spy.default = torch.ops.hwplugin.rotary_embedding.default
    monkeypatch.setattr(_op_kernels, "implementation", lambda kernel, op: spy)
    for kernel, dtype in ((cases.VLLM_FLOAT32, torch.float32), (cases.VLLM, torch.bfloat16)):
        seen.clear()
        # With a table in float32 the operation rounds once, as vLLM's does: right, if not bit for bit.
        assert bench.measure(kernel, CASE)["mismatch"] is None
        assert set(seen) == {dtype}


def test_ours_is_held_to_every_bit(bench, monkeypatch):
    def once(positions, query, key, head, table, neox):
        torch.ops.hwplugin.rotary_embedding(positions, query, key, head, table.float(), neox)

    once.default = torch.ops.hwplugin.rotary_embedding.default
    monkeypatch.setattr(_op_kernels, "implementation", lambda kernel, op: once)
    assert bench.measure(cases.VLLM, CASE)["mismatch"] is None
    assert bench.measure(cases.OURS, CASE)["mismatch"].startswith("query: ")


def test_ours_is_missing_where_its_kernel_is_and_says_why(monkeypatch):
    # Without its kernel the reference would run: that is no figure of the kernel.
    cpu = dataclasses.replace(torch_build.installed(), cuda=None, musa=None)
    monkeypatch.setattr(torch_build, "installed", lambda: cpu)
    with pytest.raises(Missing, match="is a CPU build"):
        _op_kernels.implementation(cases.OURS, "topk_softmax")


def test_vllms_operation_is_looked_for_where_its_libraries_define_it(monkeypatch):
    monkeypatch.setattr(_op_kernels, "needed", lambda module: None)
    with pytest.raises(Missing, match="this vLLM has no operation no_such_operation"):
        _op_kernels.implementation(cases.VLLM, "no_such_operation")
    library = torch.library.Library("_moe_C", "FRAGMENT")
    library.define("of_a_test(Tensor a) -> Tensor")
    assert _op_kernels.implementation(cases.VLLM, "of_a_test") is torch.ops._moe_C.of_a_test


def test_arguments_that_a_later_vllm_added_are_none():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("with_more(Tensor a, bool b, Tensor? c, Tensor? d=None) -> ()")
    library.define("with_a_number(Tensor a, int b) -> ()")
    assert _op_kernels.trailing(torch.ops._C.with_more, 2) == [None]
    assert _op_kernels.trailing(torch.ops._C.with_more, 3) == []
    with pytest.raises(ValueError, match="also needs b"):
        _op_kernels.trailing(torch.ops._C.with_a_number, 1)
