# SPDX-License-Identifier: Apache-2.0
"""Draft rows of caches in every layout, byte by byte: what is put back, what becomes zero, and what is left.

By torch, and by the table that the kernels get.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.nwor.layout import CacheRows, UnknownLayout, as_rows  # noqa: E402
from vllm_hwplugin.nwor.reference import ReferenceRows  # noqa: E402
from vllm_hwplugin.nwor.rows import Batch, KernelRows, Rejected  # noqa: E402

from .host_kernels import kernels  # noqa: E402
from .steps import (  # noqa: E402
    BLOCK,
    LAYOUTS,
    Layout,
    Step,
    assert_passes_over_what_is_no_slot,
    assert_restores,
    assert_zeroes,
    by_number,
    by_sampled,
)


@pytest.fixture(params=LAYOUTS, ids=[name.replace(" ", "-") for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> Layout:
    torch.manual_seed(0)
    return LAYOUTS[request.param]


@pytest.fixture(params=[by_number, by_sampled], ids=["by-number", "by-what-was-sampled"])
def rejected(request: pytest.FixtureRequest) -> Rejected:
    return request.param()


@pytest.fixture(params=[ReferenceRows, KernelRows])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    with kernels():
        yield request.param


def test_the_caches_are_as_if_rejected_drafts_had_never_been_written(
    layout: Layout, rejected: Rejected, make: Any
) -> None:
    step = Step(layout, True, make)
    assert_restores(step, lambda: step.rows.log(5), lambda: step.rows.restore(rejected))


def test_rejected_drafts_become_zeros_and_nothing_else_does(layout: Layout, rejected: Rejected, make: Any) -> None:
    step = Step(layout, False, make)
    assert_zeroes(step, lambda: step.rows.restore(rejected))


@pytest.mark.parametrize("keep", [True, False], ids=["restore", "scrub"])
def test_what_no_step_has_mapped_is_passed_over(keep: bool, make: Any) -> None:
    """A dummy batch maps its own tokens alone, and the mapping's memory may hold anything after a sleep."""
    step = Step(LAYOUTS["token by token"], keep, make)
    log = (lambda: step.rows.log(5)) if keep else (lambda: None)
    assert_passes_over_what_is_no_slot(step, log, lambda: step.rows.restore(by_number()))


def test_a_row_that_was_not_restored_is_found_by_layer_and_slot(layout: Layout, rejected: Rejected) -> None:
    step = Step(layout, True, ReferenceRows)
    step.rows.log(5)
    step.write(step.everything)
    slots = step.rows.rejected_slots(rejected)
    step.rows.restore(rejected)
    assert step.rows.differing(slots, zeros=False) == []
    step.slots = step.given
    step.write([8])
    assert {(cache.layer, slot) for cache, slot, _ in step.rows.differing(slots, zeros=False)} == {
        ("layer 0", int(step.slots[0][8])),
        ("layer 1", int(step.slots[1][8])),
    }


def test_a_layout_that_needs_more_than_two_dimensions_of_runs_is_refused() -> None:
    cache = torch.zeros(2, 3, 2, 4, 8, 5)[..., ::2]
    with pytest.raises(UnknownLayout, match=r"of a layer, .* at most two dimensions of runs"):
        as_rows("a layer", cache, 1, 3)


@pytest.mark.parametrize(("dtype", "size", "word"), [(torch.bfloat16, 8, 16), (torch.int8, 12, 4), (torch.int8, 7, 1)])
def test_words_divide_whatever_a_row_begins_at(dtype: Any, size: int, word: int) -> None:
    cache = torch.zeros(6, 2, BLOCK, 3, size, dtype=dtype)
    assert CacheRows("a layer", 0, as_rows("a layer", cache, 0, 2)).word == word
    # Runs as long as before, but 24 bytes further apart. With four of them tokens and blocks begin at whole words.
    for heads in (3, 4):
        wider = torch.zeros(6, 2, BLOCK, heads, size + 24 // dtype.itemsize, dtype=dtype)[..., :size]
        assert CacheRows("a layer", 0, as_rows("a layer", wider, 0, 2)).word == min(word, 4)
    # Rows that begin 4 bytes behind a whole word of 16.
    memory = torch.zeros(cache.numel() + 4 // dtype.itemsize, dtype=dtype)
    later = memory[4 // dtype.itemsize :].view(cache.shape)
    assert CacheRows("a layer", 0, as_rows("a layer", later, 0, 2)).word == min(word, 4)


def test_words_are_those_of_every_cache() -> None:
    """One launch serves all layers, so it moves what the least aligned of them allows."""
    names = ("token by token", "single bytes")
    caches = [
        CacheRows(name, 0, as_rows(name, LAYOUTS[name].make("cpu"), LAYOUTS[name].block, LAYOUTS[name].token))
        for name in names
    ]
    assert [cache.word for cache in caches] == [16, 1]
    batch = Batch(torch.tensor([0, 4], dtype=torch.int32), {0: BLOCK + torch.arange(4)}, 1, 3)
    with kernels():
        KernelRows(caches, batch, keep=True).log(1)
