"""Which shapes are captured, and which batch is padded to which: plain numbers, no torch."""

from __future__ import annotations

import pytest

from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys, pad_up, request_ladder


@pytest.mark.parametrize("k", range(1, 9))
def test_the_ladder_has_the_targets_rungs(k: int) -> None:
    sizes = [(1 + k) * rung for rung in (1, 2, 4, 8, 16)]
    assert request_ladder(sizes, 1 + k, 16) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("sizes", "query_len", "max_num_seqs", "ladder"),
    [
        ([3, 6, 12, 24], 3, 7, (1, 2, 4, 7)),  # the fullest batch lies between two rungs
        ([3, 6, 12, 24], 3, 9, (1, 2, 4, 8)),  # the fullest batch lies above the largest size
        ([3, 6, 12, 24], 3, 1, (1,)),
        ([4, 8, 16, 24], 3, 8, (8,)),  # sizes that no whole batch of the target fills
        ([24, 3, 12], 3, 8, (1, 4, 8)),  # in any order
        ([2, 4], 6, 8, ()),
        ([2, 4], 6, 1, ()),
        ([], 3, 8, ()),
    ],
)
def test_the_ladder(sizes: list[int], query_len: int, max_num_seqs: int, ladder: tuple[int, ...]) -> None:
    assert request_ladder(sizes, query_len, max_num_seqs) == ladder
    assert request_ladder(iter(sizes), query_len, max_num_seqs) == ladder


@pytest.mark.parametrize(
    ("count", "rung"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, None), (0, None), (-1, None)]
)
def test_pad_up(count: int, rung: int | None) -> None:
    assert pad_up((1, 2, 4, 8), count) == rung


def test_pad_up_without_rungs() -> None:
    assert pad_up((), 1) is None


K3 = DraftKeys(uniform={1: (1, 2, 4), 4: (1, 2, 4)}, mixed=(4, 8, 16, 32), max_num_seqs=6)


@pytest.mark.parametrize(
    ("num_tokens", "query_len", "shape"),
    [
        (1, 1, (1, 1, 1)),  # one request's one-token step is not padded to 1 + k
        (3, 1, (4, 4, 1)),
        (4, 4, (4, 1, 4)),
        (12, 4, (16, 4, 4)),
        (5, 1, (8, 6, None)),  # above the one-token rungs: a mixed graph
        (20, 4, (32, 6, None)),
        (7, None, (8, 6, None)),
        (3, None, (4, 4, None)),  # no more rows than tokens
        (33, None, None),
        (36, 4, None),
        (10, 5, (16, 6, None)),  # uniform, of a length that has no graphs of its own
        (7, 4, (8, 6, None)),  # no whole number of such requests
        (0, 1, None),
    ],
)
def test_find(num_tokens: int, query_len: int | None, shape: tuple[int, int, int | None] | None) -> None:
    assert K3.find(num_tokens, query_len) == (None if shape is None else GraphShape(*shape))


def test_find_without_mixed_graphs() -> None:
    keys = DraftKeys(uniform={1: (1, 2), 4: (1, 2)}, mixed=(), max_num_seqs=6)
    assert keys.find(2, 1) == uniform_shape(1, 2)
    assert keys.find(8, 4) == GraphShape(num_tokens=8, num_reqs=2, query_len=4)
    for num_tokens, query_len in [(3, 1), (12, 4), (8, None), (6, 3)]:
        assert keys.find(num_tokens, query_len) is None


def test_all_names_every_shape_once_largest_first() -> None:
    shapes = K3.all()
    assert [(shape.num_tokens, shape.num_reqs, shape.query_len) for shape in shapes] == [
        (32, 6, None),
        (16, 6, None),
        (16, 4, 4),
        (8, 6, None),
        (8, 2, 4),
        (4, 4, 1),
        (4, 4, None),
        (4, 1, 4),
        (2, 2, 1),
        (1, 1, 1),
    ]
    assert len(set(shapes)) == len(shapes)


def test_the_largest_are_one_of_each_kind_and_one_of_few_requests() -> None:
    keys = DraftKeys(uniform={1: (1, 2, 48, 128), 2: (), 4: (1, 4)}, mixed=(8, 64), max_num_seqs=128)
    assert keys.largest(64) == DraftKeys(uniform={1: (48, 128), 4: (4,)}, mixed=(64,), max_num_seqs=128)


def test_what_is_found_is_captured() -> None:
    captured = set(K3.all())
    found = {K3.find(count, length) for count in range(40) for length in (None, 1, 2, 4)} - {None}
    assert found == captured


def test_no_keys() -> None:
    assert DraftKeys(uniform={1: (), 4: ()}, mixed=(), max_num_seqs=6).all() == ()
