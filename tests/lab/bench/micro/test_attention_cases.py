"""The attention table: its shapes, bytes and operations."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase

DRAWN = AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)


def test_lengths_are_equal_or_one_draw_in_every_process_whatever_the_heads_and_query_tokens():
    assert AttentionCase("decode", 3, 70, 4, 2).lengths == (70, 70, 70)
    assert DRAWN.lengths == (47, 164, 34, 40)
    assert AttentionCase("decode", 4, 95, 1, 1, spread=1.0).lengths == DRAWN.lengths
    assert AttentionCase("decode", 4, 80, 4, 2, spread=1.0).lengths != DRAWN.lengths


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (9, 4), (7, 1)])
def test_the_operations_are_those_of_the_pairs_that_the_mask_leaves(shape):
    context, query = shape
    case = AttentionCase("decode", 3, context, query, 2, heads=8, head_size=64)
    pairs = sum(key <= context - query + row for row in range(query) for key in range(context))
    assert case.flops == 3 * 8 * pairs * 64 * 2 * 2


def test_figures_of_a_draw_are_the_sums_over_its_requests():
    assert DRAWN.pages == (3, 11, 3, 3)
    assert DRAWN.cache_elements == 20 * 16 * 2 * 32
    assert DRAWN.kv_bytes == (47 + 164 + 34 + 40) * 2 * 32 * 2 * 2
    alone = [AttentionCase("decode", 1, length, 4, 2, head_size=32) for length in DRAWN.lengths]
    for figure in ("kv_bytes", "bytes_each", "flops", "cache_elements"):
        assert getattr(DRAWN, figure) == sum(getattr(one, figure) for one in alone), figure
    # And of queries and outputs.
    assert DRAWN.bytes_each - DRAWN.kv_bytes == 2 * 4 * 4 * 8 * 32 * 2
