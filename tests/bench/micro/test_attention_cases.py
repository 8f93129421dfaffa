"""The attention table: its shapes, bytes and operations."""

from __future__ import annotations

from itertools import product

import pytest

from vllm_hwplugin.bench.micro import _attention_cases as cases
from vllm_hwplugin.bench.micro._attention_cases import AttentionCase


def test_every_shape_of_the_decode_table_is_there():
    found = {(c.batch, c.context, c.query, c.kv_heads, c.heads, c.head_size, c.page) for c in cases.DECODE}
    assert found == {
        (*shape, 8, 512, 16) for shape in product((1, 8, 64), (1024, 8192, 32768), (1, 4, 8, 16, 32), (1, 4))
    }
    assert len(cases.DECODE) == 90


def test_prefills_are_of_8k_tokens_at_both_head_sizes():
    for narrow, wide in zip(cases.PREFILL_256, cases.PREFILL, strict=True):
        assert wide.tokens == narrow.tokens == 8192
        assert (wide.query, wide.head_size, narrow.head_size) == (wide.context, 512, 256)
        assert (wide.batch, wide.kv_heads) == (narrow.batch, narrow.kv_heads)


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (9, 4), (7, 1)])
def test_the_operations_are_those_of_the_pairs_that_the_mask_leaves(shape):
    context, query = shape
    case = AttentionCase("decode", 3, context, query, 2, heads=8, head_size=64)
    pairs = sum(key <= context - query + row for row in range(query) for key in range(context))
    assert case.flops == 3 * 8 * pairs * 64 * 2 * 2


def test_bytes_are_of_keys_and_values_and_for_the_rotation_of_queries_and_outputs_too():
    case = AttentionCase("decode", 64, 32768, 1, 4)
    assert case.kv_bytes == 64 * 32768 * 4 * 512 * 2 * 2
    assert case.bytes_each - case.kv_bytes == 2 * 64 * 8 * 512 * 2


def test_the_plan_has_every_kernel_side_by_side_and_ours_before_what_may_be_cut_off():
    plan = cases.plan()
    assert len(plan) == len(set(plan))
    for case in (*cases.DECODE, *cases.PREFILL):
        assert (cases.OURS, case.key) in plan
        assert (cases.OURS_TRITON, case.key) in plan
        assert (cases.TRITON, case.key) in plan
        assert (cases.FA4, case.key) in plan
        assert (cases.FLASHINFER, case.key) in plan
    for case in cases.PREFILL:
        for kernel in (cases.FLEX, cases.SDPA, cases.SDPA_REPEATED):
            assert (kernel, case.key) in plan
    for case in cases.PREFILL_256:
        assert (cases.FA3, case.key) in plan
    ours = max(i for i, (kernel, _) in enumerate(plan) if kernel == cases.OURS)
    assert {kernel for kernel, _ in plan[ours + 2 :]} == {cases.OURS_TRITON, cases.FA4, cases.FLASHINFER}
    first = plan.index((cases.OURS, cases.DECODE[0].key))
    assert plan[first + 1] == (cases.TRITON, cases.DECODE[0].key)
    prefill = plan.index((cases.OURS, cases.PREFILL[0].key))
    assert plan[prefill + 1] == (cases.OURS_TRITON, cases.PREFILL[0].key)
