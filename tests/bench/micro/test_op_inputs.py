"""Arguments of operations, and the comparison with the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_hwplugin.bench.micro import _op_cases as cases
from vllm_hwplugin.bench.micro import _op_inputs, _op_kernels
from vllm_hwplugin.bench.micro._op_cases import OpCase, Operand


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


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
            else:
                assert float((value == 0).float().mean()) < 0.05, operand.name


def test_positions_of_a_prefill_follow_each_other(random):
    one = Operand("positions", (1000,), "int64", "in", "positions", limit=600)
    found = _op_inputs._tensor(one, "cpu", random)
    assert set(((found[1:] - found[:-1]) % 600).tolist()) == {1}


SUM = OpCase(
    "sum",
    "2",
    1000,
    (
        Operand("out", (1000, 4), "bfloat16", "out", "spoiled", tolerance=2.0**-7),
        Operand("left", (1000, 4), "bfloat16", "in"),
        Operand("lse", (3, 1000), "float32", "inout", token_dim=1, tolerance=1e-6),
        Operand("order", (1000,), "int32", "out", "spoiled", by_position=True),
        7,
    ),
)


def run(out, left, lse, order, number, fault=None):
    out.copy_(left * number)
    lse.mul_(2)
    order.copy_(torch.arange(len(order)))
    if fault == "last row":
        out[-1, 2] = torch.nan
    elif fault == "small":
        lse[1, 0] *= 1 + 1e-4


@pytest.mark.parametrize(
    ("fault", "found"),
    [(None, None), ("last row", "out: 1 of "), ("small", "lse: 1 of ")],
)
def test_single_rows_of_the_output_are_held_to_the_reference(random, fault, found):
    values = _op_inputs.arguments(SUM, "cpu", random)
    rows = _op_inputs.rows(SUM, random)
    assert 0 in rows
    assert 999 in rows
    assert 32 < len(rows) <= 64
    right = _op_inputs.on_cpu(SUM, values, rows)
    run(*right)
    run(*values, fault=fault)
    said = _op_inputs.mismatch(SUM, values, right, rows)
    assert said is None if found is None else said.startswith(found)


def test_what_depends_on_the_rows_number_is_compared_where_all_rows_are(random):
    operands = [
        dataclasses.replace(a, shape=tuple(8 if n == 1000 else n for n in a.shape)) if isinstance(a, Operand) else a
        for a in SUM.arguments
    ]
    few = OpCase("sum", "2", 8, tuple(operands))
    values, rows = _op_inputs.arguments(few, "cpu", random), _op_inputs.rows(few, random)
    assert rows.tolist() == list(range(8))
    right = _op_inputs.on_cpu(few, values, rows)
    run(*right)
    run(*values)
    assert _op_inputs.mismatch(few, values, right, rows) is None
    values[3][5] += 1
    assert _op_inputs.mismatch(few, values, right, rows) == (
        "order: 1 of 8 compared values are wrong; at [5] 6 instead of 5"
    )


def rotated(values, case):
    """As vLLM's kernel: in float32, rounded once."""
    positions, query, key, head, table, neox = values
    cos, sin = table.float().index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.float().unflatten(-1, (-1, head))
        x, y = heads.chunk(2, dim=-1) if neox else (heads[..., ::2], heads[..., 1::2])
        first, second = x * cos - y * sin, y * cos + x * sin
        parts = torch.cat([first, second], -1) if neox else torch.stack([first, second], -1).flatten(-2)
        tensor.copy_(parts.flatten(-2))


@pytest.mark.parametrize("shape", ["32/8 heads of 128", "32/8 heads of 128, GPT-J"])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (None, None),
        ("elsewhere", "query: "),
        ("one element", "key: 1 of "),
        ("signs", "query: "),
        ("nan", "query: 1 of "),
    ],
)
def test_a_rotation_that_is_rounded_once_is_right_and_a_wrong_one_is_not(random, shape, fault, found):
    case = cases.CASES[f"rotary_embedding {shape} t64"]
    values = _op_inputs.arguments(case, "cpu", random)
    rows = _op_inputs.rows(case, random)
    right = _op_inputs.on_cpu(case, values, rows)
    _op_kernels.reference("rotary_embedding")(*right)
    if fault == "elsewhere":
        values[0].copy_((values[0] + 1) % 40960)
    if fault == "signs":
        values[4][:, 64:].neg_()
    rotated(values, case)
    if fault == "one element":
        heads = values[2][5].unflatten(-1, (8, 128))[3]
        # Of the pair's length, twice what rounding explains: wherever in the pair the element is.
        x, y = (7, 71) if "GPT-J" not in shape else (6, 7)
        heads[x] += 2 * 3.125 * 2.0**-8 * torch.hypot(heads[x], heads[y])
    if fault == "nan":
        values[1][3, 9] = torch.nan
    said = _op_inputs.mismatch(case, values, right, rows)
    assert said is None if found is None else said.startswith(found)


def test_ours_has_to_rotate_bit_for_bit(random):
    case = cases.CASES["rotary_embedding 32/8 heads of 128 t8"]
    values, rows = _op_inputs.arguments(case, "cpu", random), torch.arange(8)
    right = _op_inputs.on_cpu(case, values, rows)
    _op_kernels.reference("rotary_embedding")(*right)
    assert _op_inputs.mismatch(case, right, right, rows, ours=True) is None
    rotated(values, case)
    assert _op_inputs.mismatch(case, values, right, rows) is None
    assert _op_inputs.mismatch(case, values, right, rows, ours=True).startswith("query: ")


def test_the_tolerance_does_not_shrink_where_a_pairs_products_cancel(random):
    """Two products that all but cancel leave the roundings of both."""
    one = Operand("query", (1, 4), "bfloat16", "inout", tolerance=3.125 * 2.0**-8, pairs=cases.Pairs(4, True))
    case = OpCase("x", "4", 1, (one,))
    wanted = torch.tensor([[2.0**-9, 0.0, 1.0, 0.0]])
    for error, good in ((3 * 2.0**-8, True), (3.2 * 2.0**-8, False)):
        found = wanted + torch.tensor([[error, 0.0, 0.0, 0.0]])
        assert (_op_inputs.mismatch(case, [found], [wanted], torch.arange(1)) is None) == good
    # The other pair has no length, and so no room.
    found = wanted + torch.tensor([[0.0, 0.0, 0.0, 1e-6]])
    assert _op_inputs.mismatch(case, [found], [wanted], torch.arange(1)) is not None


def test_an_output_that_was_not_written_is_wrong(random):
    one = cases.CASES["rms_norm_dynamic_per_token_quant 4096 t8"]
    values, rows = _op_inputs.arguments(one, "cpu", random), torch.arange(8)
    right = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
    right[0] = torch.ones(8, 4096).to(torch.float8_e4m3fn)
    right[3] = torch.ones(8, 1)
    assert _op_inputs.mismatch(one, values, right, rows).startswith("result: 32768 of 32768")
