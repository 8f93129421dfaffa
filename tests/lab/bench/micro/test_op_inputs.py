"""Arguments of operations, and the comparison with the reference: it finds one wrong element and allows rounding."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro import _op_inputs, _ops_bench
from vllm_hwplugin_lab.bench.micro._op_cases import Operand

#: One shape of each operation, all of whose rows are compared, and two of which a sample is.
SOME = [next(one for one in cases.CASES.values() if (one.op, one.tokens) == (op, 8)) for op in cases.OPS]
SOME += [cases.CASES["merge_attn_states 8 heads of 128 t8192"], cases.CASES["topk_softmax 6 of 64 t8192"]]


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def compared(case, random):
    """Arguments, those of the compared rows after the reference has run on them, and these rows."""
    values, rows = _op_inputs.arguments(case, "cpu", random), _op_inputs.rows(case, random)
    right = _op_inputs.on_cpu(case, values, rows)
    _ops_bench.reference(case.op)(*right)
    return values, right, rows


def test_arguments_are_as_the_case_says(random):
    for one in cases.CASES.values():
        if one.tokens != 8:
            continue
        for operand, value in zip(one.arguments, _op_inputs.arguments(one, "cpu", random), strict=True):
            if not isinstance(operand, Operand):
                assert value is operand
                continue
            assert (tuple(value.shape), value.dtype) == (operand.shape, getattr(torch, operand.dtype))
            if operand.transposed:
                assert value.stride() == (1, value.shape[0])
            if operand.role == "out":
                number = value.to(torch.float32)
                assert bool((number.isnan() | (number == -1)).all()), operand.name
            elif operand.fill == "positions":
                assert bool(((value >= 0) & (value < cases.POSITIONS)).all())


def test_of_many_rows_the_first_the_last_and_others_are_compared(random):
    case = next(one for one in cases.CASES.values() if one.tokens == 8192)
    rows = _op_inputs.rows(case, random)
    assert {0, 8191} <= set(rows.tolist())
    assert 32 < len(rows) <= 64


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.key)
def test_each_output_is_held_to_the_reference(random, case):
    values, right, rows = compared(case, random)
    outputs = [n for n, one in enumerate(case.arguments) if isinstance(one, Operand) and one.role != "in"]
    # What was not written is wrong, for the first output that was to be.
    assert _op_inputs.mismatch(case, values, right, rows) is not None
    _ops_bench.reference(case.op)(*values)
    assert _op_inputs.mismatch(case, values, right, rows) is None
    for n in outputs:
        if case.arguments[n].tolerance is None:
            continue  # single rows say nothing of it
        before = values[n].clone()
        values[n][(-1,) * values[n].dim()] = 5 if values[n].dtype == torch.int32 else 300.0
        said = _op_inputs.mismatch(case, values, right, rows)
        assert said is not None
        assert said.startswith(f"{case.arguments[n].name}: 1 of ")
        values[n].copy_(before)
