"""The patched text of vLLM's `CudagraphDispatcher`: stock for everybody but a drafter that has graphs."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.v1.cudagraph_dispatcher as stock  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.forward_context import BatchDescriptor  # noqa: E402

from vllm_hwplugin.spec_decode.draft_keys import DraftKeys  # noqa: E402

from .drafters import make_config  # noqa: E402

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
KEYS = DraftKeys(uniform={1: (1, 2, 4), 3: (1, 2, 4)}, mixed=(), max_num_seqs=4)
SIZES = [1, 3, 6, 12]
COUNTS = range(1, 15)
VALID = [None, {NONE}, {PIECEWISE}, {FULL}, {NONE, PIECEWISE}, {NONE, FULL}, {PIECEWISE, FULL}]
INVALID = [None, set(), {FULL}, {PIECEWISE}]


@pytest.fixture
def patched(patched_module):
    return patched_module("vllm/v1/cudagraph_dispatcher.py")


def dispatcher(module, mode, *arguments, query_len=3, **keywords):
    made = module.CudagraphDispatcher(make_config(SIZES, max_num_seqs=4), *arguments, **keywords)
    made.uniform_decode_query_len = query_len
    if mode is not None:
        made.initialize_cudagraph_keys(mode, query_len)
    return made


def outcome(made, num_tokens, **arguments):
    """The answer, or which error: a stock assertion has to stay one."""
    sets = {name: None if value is None else set(value) for name, value in arguments.items() if name in SET_NAMES}
    try:
        return made.dispatch(num_tokens, **arguments | sets)
    except AssertionError as error:
        return str(error)


SET_NAMES = ("valid_modes", "invalid_modes")
GRID = [
    {"uniform_decode": uniform, "valid_modes": valid, "invalid_modes": invalid}
    for uniform, valid, invalid in itertools.product([False, True], VALID, INVALID)
]
MODES = [None, NONE, PIECEWISE, FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "uninitialised" if mode is None else mode.name)
@pytest.mark.parametrize(
    "arguments", [(), (False,), (True,)], ids=["default", "target", "a drafter before it has keys"]
)
def test_without_draft_keys_every_answer_is_stocks(patched, mode, arguments):
    ours, theirs = dispatcher(patched, mode, *arguments), dispatcher(stock, mode)
    if arguments != (True,):
        # Keys alone make no drafter.
        ours.draft_keys = KEYS
    answers = set()
    for num_tokens, case in itertools.product(COUNTS, GRID):
        if case["uniform_decode"] and num_tokens % 3:
            continue
        expected = outcome(theirs, num_tokens, **case)
        assert outcome(ours, num_tokens, **case) == expected, (num_tokens, case)
        assert outcome(ours, num_tokens, **case, uniform_decode_query_len=1) == expected
        answers.add(expected)
    assert len(answers) > 3
    assert ours.get_capture_descs() == theirs.get_capture_descs()
    assert ours.cudagraph_keys == theirs.cudagraph_keys


@pytest.fixture
def drafter(patched):
    made = dispatcher(patched, PIECEWISE, for_draft_model=True)
    made.draft_keys = KEYS
    return made


@pytest.mark.parametrize(
    ("num_tokens", "query_len", "descriptor"),
    [
        (1, 1, BatchDescriptor(num_tokens=1, num_reqs=1, uniform=True)),  # not padded to 1 + k
        (3, 1, BatchDescriptor(num_tokens=4, num_reqs=4, uniform=True)),
        (3, 3, BatchDescriptor(num_tokens=3, num_reqs=1, uniform=True)),
        (9, 3, BatchDescriptor(num_tokens=12, num_reqs=4, uniform=True)),
    ],
)
@pytest.mark.parametrize("valid", [None, {FULL}, {FULL, NONE}, {FULL, PIECEWISE, NONE}])
def test_a_draft_batch_with_a_graph_gets_it(drafter, num_tokens, query_len, descriptor, valid):
    answer = drafter.dispatch(num_tokens, valid_modes=valid, uniform_decode_query_len=query_len)
    assert answer == (FULL, descriptor)


def test_a_draft_graph_may_be_larger_than_the_targets_largest(patched):
    made = dispatcher(patched, PIECEWISE, for_draft_model=True)
    made.draft_keys = DraftKeys(uniform={5: (4,)}, mixed=(), max_num_seqs=4)
    assert made.dispatch(15, uniform_decode_query_len=5)[0] == FULL
    assert made.dispatch(15, uniform_decode_query_len=3)[0] == NONE


@pytest.mark.parametrize("mode", [NONE, PIECEWISE])
def test_a_draft_batch_without_a_graph_is_dispatched_as_in_stock(patched, mode):
    drafter, theirs = dispatcher(patched, mode, for_draft_model=True), dispatcher(stock, mode)
    drafter.draft_keys = KEYS
    for num_tokens, query_len in [(5, 1), (7, None), (3, 0), (15, 3), (4, 3), (13, None)]:
        assert drafter.dispatch(num_tokens, uniform_decode_query_len=query_len) == theirs.dispatch(num_tokens)


def test_full_graphs_do_not_need_piecewise_ones(patched):
    drafter = dispatcher(patched, NONE, for_draft_model=True)
    drafter.draft_keys = KEYS
    assert drafter.dispatch(2, uniform_decode_query_len=1)[0] == FULL


def test_a_caller_that_does_not_allow_full_never_gets_it(drafter):
    for num_tokens, query_len, valid in itertools.product(COUNTS, [None, 0, 1, 3], [{NONE}, {NONE, PIECEWISE}]):
        mode, _ = drafter.dispatch(num_tokens, valid_modes=set(valid), uniform_decode_query_len=query_len)
        assert mode in valid
        mode, _ = drafter.dispatch(
            num_tokens, valid_modes={*valid, FULL}, invalid_modes={FULL}, uniform_decode_query_len=query_len
        )
        assert mode in valid


def test_a_caller_that_names_no_query_length_gets_no_uniform_graph(drafter):
    assert all(drafter.dispatch(num_tokens)[0] != FULL for num_tokens in COUNTS)
