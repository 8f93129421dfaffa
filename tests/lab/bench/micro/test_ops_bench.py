"""Times and parity of operations, on the CPU, where the plugin's references are both sides."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro import _ops_bench
from vllm_hwplugin_lab.bench.micro._op_cases import Operand
from vllm_hwplugin_lab.bench.micro._ops_bench import OpsBench
from vllm_hwplugin_lab.bench.micro._supervise import Missing
from vllm_hwplugin_lab.bench.micro._timer import Copies

#: One shape of each operation, all of whose rows are compared, and two of which a sample is.
SOME = [next(one for one in cases.CASES.values() if (one.op, one.tokens) == (op, 8)) for op in cases.OPS]
SOME += [cases.CASES["merge_attn_states 8 heads of 128 t8192"], cases.CASES["topk_softmax 6 of 64 t8192"]]
CASE = "merge_attn_states 8 heads of 128 t8"


@pytest.fixture
def bench(fake_timer, quick, monkeypatch):
    monkeypatch.setattr(_ops_bench, "implementation", lambda kernel, op: _ops_bench.reference(op))
    timer = fake_timer()
    return OpsBench(timer, Copies(timer), 0)


def test_an_operation_is_timed_and_one_that_is_wrong_says_where(bench, monkeypatch):
    facts = bench.measure(cases.OURS, CASE)
    assert (facts["mismatch"], facts["sets"]) == (None, 2)
    assert set(facts) >= {"seconds", "copy_seconds", "launches"}

    def wrong(output, *rest):
        torch.ops.hwplugin.merge_attn_states(output, *rest)
        output[3, 7, 1] += 1

    wrong.default = torch.ops.hwplugin.merge_attn_states.default
    monkeypatch.setattr(_ops_bench, "implementation", lambda kernel, op: wrong)
    facts = bench.measure(cases.VLLM, CASE)
    assert facts["mismatch"].startswith("output: 1 of 8192")
    assert facts["seconds"] >= 0


def test_vllms_operation_is_looked_for_where_its_libraries_define_it(monkeypatch):
    monkeypatch.setattr(_ops_bench, "needed", lambda module: None)
    with pytest.raises(Missing, match="this vLLM has no operation no_such_operation"):
        _ops_bench.implementation(cases.VLLM, "no_such_operation")
    library = torch.library.Library("_moe_C", "FRAGMENT")
    library.define("of_a_test(Tensor a) -> Tensor")
    assert _ops_bench.implementation(cases.VLLM, "of_a_test") is torch.ops._moe_C.of_a_test
    # The plugin's own definition under that name is not vLLM's.
    monkeypatch.setattr(_ops_bench, "is_defined", lambda op: op == "of_a_test")
    with pytest.raises(Missing):
        _ops_bench.implementation(cases.VLLM, "of_a_test")


def test_arguments_that_a_later_vllm_added_are_none():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("with_more(Tensor a, bool b, Tensor? c, Tensor? d=None) -> ()")
    library.define("with_a_number(Tensor a, int b) -> ()")
    assert _ops_bench.trailing(torch.ops._C.with_more, 2) == [None]
    assert _ops_bench.trailing(torch.ops._C.with_more, 3) == []
    with pytest.raises(ValueError, match="also needs b"):
        _ops_bench.trailing(torch.ops._C.with_a_number, 1)


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def test_outputs_begin_as_what_no_kernel_writes(random):
    for one in cases.CASES.values():
        values = zip(one.arguments, _ops_bench.arguments(one, "cpu", random), strict=True) if one.tokens == 8 else ()
        for operand, value in values:
            if isinstance(operand, Operand) and operand.role == "out":
                number = value.to(torch.float32)
                assert bool((number.isnan() | (number == -1)).all()), operand.name


def test_of_many_rows_the_first_the_last_and_others_are_compared(random):
    case = next(one for one in cases.CASES.values() if one.tokens == 8192)
    rows = _ops_bench.rows(case, random)
    assert {0, 8191} <= set(rows.tolist())
    assert 32 < len(rows) <= 64


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.key)
def test_each_output_is_held_to_the_reference(random, case):
    values, rows = _ops_bench.arguments(case, "cpu", random), _ops_bench.rows(case, random)
    right = _ops_bench.on_cpu(case, values, rows)
    _ops_bench.reference(case.op)(*right)
    outputs = [n for n, one in enumerate(case.arguments) if isinstance(one, Operand) and one.role != "in"]
    # What was not written is wrong, for the first output that was to be.
    assert _ops_bench.mismatch(case, values, right, rows) is not None
    _ops_bench.reference(case.op)(*values)
    assert _ops_bench.mismatch(case, values, right, rows) is None
    for n in outputs:
        if case.arguments[n].tolerance is None:
            continue  # single rows say nothing of it
        before = values[n].clone()
        values[n][(-1,) * values[n].dim()] = 5 if values[n].dtype == torch.int32 else 300.0
        said = _ops_bench.mismatch(case, values, right, rows) or ""
        assert said.startswith(f"{case.arguments[n].name}: 1 of ")
        values[n].copy_(before)
