"""The attention table: its shapes, bytes and operations."""

from __future__ import annotations

import math
import statistics
from itertools import product

import pytest

from vllm_hwplugin_lab.bench.micro import _attention_cases as cases
from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase

DRAWN = AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)


def test_every_shape_of_the_decode_table_is_there():
    found = {(c.batch, c.context, c.query, c.kv_heads, c.heads, c.head_size, c.page) for c in cases.DECODE}
    assert found == {
        (*shape, 8, 512, 16) for shape in product((1, 8, 64), (1024, 8192, 32768), (1, 4, 8, 16, 32), (1, 4))
    }
    assert len(cases.DECODE) == 90


def test_unequal_requests_and_batches_that_are_no_power_of_two_are_there():
    shapes = [
        {(c.batch, c.context, c.query, c.kv_heads, c.spread) for c in one}
        for one in (cases.UNEVEN, cases.NO_POWER_OF_TWO)
    ]
    assert shapes[0] == set(product((8, 24, 64), (1024, 8192), (1, 8), (1, 4), (1.0,)))
    assert shapes[1] == set(product((24, 100), (1024, 8192), (1, 8), (1,), (0.0,)))
    assert {(c.kind, c.heads, c.head_size, c.page) for c in cases.AS_SERVED} == {("decode", 8, 512, 16)}
    assert len(cases.AS_SERVED) == 32
    assert all(cases.CASES[c.key] is c for c in cases.AS_SERVED)


def test_old_results_are_found_by_their_keys():
    case = AttentionCase("decode", 8, 1024, 4, 1)
    assert case.key == "decode b8 c1024 q4 h8/1 d512"
    assert AttentionCase("decode", 8, 1024, 4, 1, spread=1.0).key == f"{case.key} s1"
    assert AttentionCase("decode", 8, 1024, 4, 1, spread=0.25).key == f"{case.key} s0.25"


def test_lengths_are_equal_or_the_same_draw_in_every_process():
    assert AttentionCase("decode", 3, 70, 4, 2).lengths == (70, 70, 70)
    assert DRAWN.lengths == (47, 164, 34, 40)


@pytest.mark.parametrize("spread", [0.25, 1.0])
def test_drawn_lengths_have_the_mean_and_the_spread(spread):
    lengths = AttentionCase("decode", 4096, 8192, 1, 1, spread=spread).lengths
    assert statistics.mean(lengths) == pytest.approx(8192, rel=0.05)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(spread, rel=0.05)


def test_other_heads_and_query_tokens_have_the_same_lengths():
    assert AttentionCase("decode", 4, 95, 1, 1, spread=1.0).lengths == DRAWN.lengths
    assert AttentionCase("decode", 4, 80, 4, 2, spread=1.0).lengths != DRAWN.lengths


def test_drawn_lengths_have_room_for_the_query_and_an_end():
    lengths = AttentionCase("decode", 512, 16, 4, 1, spread=1.5).lengths
    assert (min(lengths), max(lengths)) == (4, 128)
    assert min(lengths.count(4), lengths.count(128)) > 1


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


def test_figures_of_a_draw_are_the_sums_over_its_requests():
    assert DRAWN.pages == (3, 11, 3, 3)
    assert DRAWN.cache_elements == 20 * 16 * 2 * 32
    assert DRAWN.kv_elements == (47 + 164 + 34 + 40) * 2 * 32
    alone = [AttentionCase("decode", 1, length, 4, 2, head_size=32) for length in DRAWN.lengths]
    for figure in ("kv_bytes", "bytes_each", "flops", "cache_elements"):
        assert getattr(DRAWN, figure) == sum(getattr(one, figure) for one in alone), figure


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
    served = [(kernel, case.key) for case in cases.AS_SERVED for kernel in (cases.OURS, cases.TRITON)]
    start = plan.index(served[0])
    assert plan[start : start + len(served)] == tuple(served)
    assert plan[start - 1] == (cases.TRITON, cases.DECODE[-1].key)
    assert plan[start + len(served)] == (cases.OURS_TRITON, cases.DECODE[0].key)
    assert {kernel for kernel, key in plan if cases.CASES[key] in cases.AS_SERVED} == {cases.OURS, cases.TRITON}
    prefill = plan.index((cases.OURS, cases.PREFILL[0].key))
    assert plan[prefill + 1] == (cases.OURS_TRITON, cases.PREFILL[0].key)
