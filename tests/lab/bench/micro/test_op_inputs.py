"""Arguments of operations, and the comparison with the reference: it finds one wrong element and allows rounding."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _op_cases as cases
from vllm_hwplugin_lab.bench.micro import _op_inputs, _op_kernels
from vllm_hwplugin_lab.bench.micro._op_cases import Operand

#: One shape of each operation, all of whose rows are compared, and two of which a sample is.
SOME = [next(one for one in cases.CASES.values() if (one.op, one.tokens) == (op, 8)) for op in cases.OPS]
SOME += [cases.CASES["merge_attn_states 8 heads of 128 t8192"], cases.CASES["topk_softmax 6 of 64 t8192"]]
ROPES = ["32/8 heads of 128", "32/8 heads of 128, GPT-J"]


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def compared(case, random):
    """Arguments, those of the compared rows after the reference has run on them, and these rows."""
    values, rows = _op_inputs.arguments(case, "cpu", random), _op_inputs.rows(case, random)
    right = _op_inputs.on_cpu(case, values, rows)
    _op_kernels.reference(case.op)(*right)
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
            if operand.row_stride is not None:
                assert value.stride() == (operand.row_stride, 1)
            if operand.transposed:
                assert value.stride() == (1, value.shape[0])
            if operand.fill == "spoiled":
                number = value.to(torch.float32)
                assert bool((number.isnan() | (number == -1)).all()), operand.name
            elif operand.fill == "positions":
                assert bool(((value >= 0) & (value < operand.limit)).all())


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
    _op_kernels.reference(case.op)(*values)
    assert _op_inputs.mismatch(case, values, right, rows, ours=True) is None
    for n in outputs:
        if case.arguments[n].by_position and len(rows) < case.tokens:
            continue  # single rows say nothing of it
        before = values[n].clone()
        values[n][(-1,) * values[n].dim()] = 5 if values[n].dtype == torch.int32 else 300.0
        said = _op_inputs.mismatch(case, values, right, rows)
        assert said is not None
        assert said.startswith(f"{case.arguments[n].name}: 1 of ")
        values[n].copy_(before)


def rotated(values):
    """As vLLM's kernel: in float32, rounded once."""
    positions, query, key, head, table, neox = values
    cos, sin = table.float().index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.float().unflatten(-1, (-1, head))
        x, y = heads.chunk(2, dim=-1) if neox else (heads[..., ::2], heads[..., 1::2])
        first, second = x * cos - y * sin, y * cos + x * sin
        parts = torch.cat([first, second], -1) if neox else torch.stack([first, second], -1).flatten(-2)
        tensor.copy_(parts.flatten(-2))


@pytest.mark.parametrize("shape", ROPES)
@pytest.mark.parametrize("fault", [None, "one element", "signs", "nan"])
def test_a_rotation_that_is_rounded_once_is_right_for_vllm_and_not_for_ours(random, shape, fault):
    case = cases.CASES[f"rotary_embedding {shape} t64"]
    values, right, rows = compared(case, random)
    if fault == "signs":
        values[4][:, 64:].neg_()
    rotated(values)
    if fault == "one element":
        heads = values[2][5].unflatten(-1, (8, 128))[3]
        # Of the pair's length, twice what rounding explains: wherever in the pair the element is.
        x, y = (7, 71) if "GPT-J" not in shape else (6, 7)
        heads[x] += 2 * 3.125 * 2.0**-8 * torch.hypot(heads[x], heads[y])
    if fault == "nan":
        values[1][3, 9] = torch.nan
    assert (_op_inputs.mismatch(case, values, right, rows) is None) == (fault is None)
    assert _op_inputs.mismatch(case, values, right, rows, ours=True).startswith("query: ")
