# SPDX-License-Identifier: Apache-2.0
"""Which shapes are captured for a V1 drafter, and which batch is padded to which; `test_draft_graphs` starts some."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_hwplugin.spec_decode.decode_batch import GraphShape
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys, FirstPass, plan_keys, request_ladder


@pytest.mark.parametrize(
    ("sizes", "query_len", "max_num_seqs", "ladder"),
    [
        ([3, 6, 12, 24], 3, 7, (1, 2, 4, 7)),  # the fullest batch lies between two rungs
        ([3, 6, 12, 24], 3, 9, (1, 2, 4, 8)),  # the fullest batch lies above the largest size
        ([4, 8, 16, 24], 3, 8, (8,)),  # sizes that no whole batch of the target fills
        ([24, 3, 12], 3, 8, (1, 4, 8)),  # in any order
        ([], 3, 8, ()),
    ],
)
def test_the_ladder(sizes: list[int], query_len: int, max_num_seqs: int, ladder: tuple[int, ...]) -> None:
    assert request_ladder(sizes, query_len, max_num_seqs) == ladder


K3 = DraftKeys(uniform={1: (1, 2, 4), 4: (1, 2, 4)}, mixed=(4, 8, 16, 32), max_num_seqs=6)


@pytest.mark.parametrize(
    ("num_tokens", "query_len", "shape"),
    [
        (1, 1, (1, 1, 1)),  # one request's one-token step is not padded to 1 + k
        (3, 1, (4, 4, 1)),
        (12, 4, (16, 4, 4)),
        (5, 1, (8, 6, None)),  # above the one-token rungs: a mixed graph
        (20, 4, (32, 6, None)),
        (7, None, (8, 6, None)),
        (3, None, (4, 4, None)),  # no more rows than tokens
        (33, None, None),
        (10, 5, (16, 6, None)),  # uniform, of a length that has no graphs of its own
        (7, 4, (8, 6, None)),  # no whole number of such requests
        (0, 1, None),
    ],
)
def test_a_batch_is_padded_to_a_shape_that_is_captured(
    num_tokens: int, query_len: int | None, shape: tuple[int, int, int | None] | None
) -> None:
    assert K3.find(num_tokens, query_len) == (None if shape is None else GraphShape(*shape))
    assert shape is None or GraphShape(*shape) in K3.all()
    uniform = DraftKeys(K3.uniform, (), K3.max_num_seqs).find(num_tokens, query_len)
    assert uniform == (GraphShape(*shape) if shape is not None and shape[2] is not None else None)


def test_the_largest_are_one_of_each_kind_and_one_of_few_requests() -> None:
    keys = DraftKeys(uniform={1: (1, 2, 48, 128), 2: (), 4: (1, 4)}, mixed=(8, 64), max_num_seqs=128)
    assert keys.largest(64) == DraftKeys(uniform={1: (48, 128), 4: (4,)}, mixed=(64,), max_num_seqs=128)


# -- which are planned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "threshold", "uniform", "mixed"),
    [
        (FirstPass(8, 1000), 8, {1: (1, 2, 4, 6), 8: (1, 2, 4, 6)}, (4, 8, 16, 24)),
        # Above what attention takes for decodes.
        (FirstPass(8, 1000), 7, {1: (1, 2, 4, 6)}, (4, 8, 16, 24)),
        # What the drafter's buffers do not hold.
        (FirstPass(8, 16), None, {1: (1, 2, 4, 6), 8: (1, 2)}, (4, 8, 16)),
        # No batch is of another shape.
        (FirstPass(4, 1000, masks=True), None, {1: (1, 2, 4, 6), 4: (1, 2, 4, 6)}, ()),
    ],
)
def test_what_a_first_pass_cannot_have_is_left_out(
    first: FirstPass, threshold: int | None, uniform: dict[int, tuple[int, ...]], mixed: tuple[int, ...]
) -> None:
    sizes = (8, 4, 16, 24)
    keys = plan_keys(first, sizes, 3, 6, mixed=sizes, steps=True, decode_threshold=threshold)
    assert keys == DraftKeys(uniform, mixed, 6)
