# SPDX-License-Identifier: Apache-2.0
"""Draft rows of caches in every layout, byte by byte: what is kept and put back, what becomes zero, and what is left."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.nwor.layout import CacheRows, UnknownLayout, as_rows  # noqa: E402
from vllm_hwplugin.nwor.reference import ReferenceRows  # noqa: E402
from vllm_hwplugin.nwor.rows import Batch, Rejected  # noqa: E402

DRAFTS, BLOCK = 3, 16


@dataclass(frozen=True)
class Layout:
    """A cache of 6 blocks: its shape, the order in which the dimensions lie in memory, and which count what."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block: int
    token: int
    dtype: Any = torch.bfloat16

    def make(self) -> Any:
        physical = [self.shape[i] for i in self.order]
        count = torch.Size(physical).numel() * self.dtype.itemsize
        flat = torch.randint(0, 256, (count,), dtype=torch.uint8).view(self.dtype)
        return flat.view(physical).permute([self.order.index(i) for i in range(len(self.order))])


LAYOUTS = {
    "keys, then values; NHD": Layout((2, 6, BLOCK, 4, 8), (0, 1, 2, 3, 4), 1, 2),
    "keys, then values; HND": Layout((2, 6, BLOCK, 4, 8), (0, 1, 3, 2, 4), 1, 2),
    "block by block; NHD": Layout((6, 2, BLOCK, 4, 8), (0, 1, 2, 3, 4), 0, 2),
    "block by block; HND": Layout((6, 2, BLOCK, 4, 8), (0, 1, 3, 2, 4), 0, 2),
    "token by token": Layout((6, 4, BLOCK, 16), (0, 2, 1, 3), 0, 2),
    "head by head": Layout((6, 4, BLOCK, 16), (0, 1, 2, 3), 0, 2),
    "heads outside blocks": Layout((6, 4, BLOCK, 16), (1, 0, 2, 3), 0, 2),
    "MLA": Layout((6, BLOCK, 72), (0, 1, 2), 0, 1),
    "float8": Layout((6, 2, BLOCK, 4, 8), (0, 1, 2, 3, 4), 0, 2, torch.float8_e4m3fn),
    "int8 with a scale in the page": Layout((6, 4, BLOCK, 2 * 12), (0, 2, 1, 3), 0, 2, torch.int8),
    "one head": Layout((6, 1, BLOCK, 16), (0, 1, 2, 3), 0, 2, torch.float32),
}


@pytest.fixture(params=LAYOUTS, ids=[name.replace(" ", "-") for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> Layout:
    torch.manual_seed(0)
    return LAYOUTS[request.param]


def row(layout: Layout, cache: Any, slot: int) -> Any:
    """A token's elements, by the dimensions that vLLM's writers index."""
    return cache.movedim((layout.block, layout.token), (0, 1))[slot // BLOCK, slot % BLOCK]


class Step:
    """Two layers of two KV cache groups, and a batch of a prompt, of three requests with 3, 1 and 3 drafts, and padding.

    The prompt's first tokens are in no cache; the drafts of the third request have no slots in the second group.
    """

    lengths = (5, 4, 2, 4, 0)
    num_drafts = (0, 3, 1, 3, 0)

    def __init__(self, layout: Layout, keep: bool) -> None:
        self.layout = layout
        self.caches = [layout.make(), layout.make()]
        total = sum(self.lengths)
        order = torch.randperm(5 * BLOCK) + BLOCK
        self.slots = [order[:total].clone(), order[total : 2 * total].clone()]
        self.slots[0][:2] = -1
        self.slots[1][9:11] = -1
        self.given = [slots.clone() for slots in self.slots]
        starts = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32)
        rows = [
            CacheRows(f"layer {group}", group, as_rows("a layer", cache, layout.block, layout.token))
            for group, cache in enumerate(self.caches)
        ]
        self.rows = ReferenceRows(rows, Batch(starts, dict(enumerate(self.slots)), 6, DRAFTS), keep)

    def bytes(self) -> list[Any]:
        """What all caches hold, as memory."""
        return [cache.untyped_storage().tolist() for cache in self.caches]

    def write(self, tokens: list[int]) -> None:
        for cache, slots in zip(self.caches, self.slots, strict=True):
            for token in tokens:
                if (slot := int(slots[token])) >= 0:
                    target = row(self.layout, cache, slot)
                    raw = torch.full((target.numel() * cache.element_size(),), 0x41 + token, dtype=torch.uint8)
                    target.copy_(raw.view(cache.dtype).view(target.shape))

    def zero(self, tokens: list[int]) -> None:
        for cache, slots in zip(self.caches, self.slots, strict=True):
            for token in tokens:
                if (slot := int(slots[token])) >= 0:
                    row(self.layout, cache, slot).zero_()


def assert_slots(step: Step) -> None:
    """Rejected drafts have none any more, all others theirs."""
    for slots, given in zip(step.slots, step.given, strict=True):
        expected = given.clone()
        expected[REJECTED_TOKENS] = -1
        assert slots.tolist() == expected.tolist()


# The last tokens of these requests: 9 to 11 would be 3 of the second request, whose tokens are 5 to 8.
REJECTED, REJECTED_TOKENS = [0, 2, 1, 3], [7, 8, 10, 12, 13, 14]
#: By what was sampled: the prompt one token, then one accepted draft, none, and none.
SAMPLED = [[7, -1, -1, -1], [7, 8, -1, -1], [7, -1, -1, -1], [7, -1, -1, -1]]


@pytest.fixture(params=["by number", "by what was sampled"])
def rejected(request: pytest.FixtureRequest) -> Rejected:
    if request.param == "by number":
        return Rejected(num_rejected=torch.tensor(REJECTED, dtype=torch.int32))
    ends = torch.tensor([*itertools.accumulate(Step.num_drafts[:4])], dtype=torch.int32)
    return Rejected(sampled_token_ids=torch.tensor(SAMPLED, dtype=torch.int32), cu_num_draft_tokens=ends)


def test_the_caches_are_as_if_rejected_drafts_had_never_been_written(layout: Layout, rejected: Rejected) -> None:
    step = Step(layout, keep=True)
    before = [cache.clone() for cache in step.caches]
    everything = list(range(sum(step.lengths)))
    step.write([token for token in everything if token not in REJECTED_TOKENS])
    expected = step.bytes()
    for cache, content in zip(step.caches, before, strict=True):
        cache.copy_(content)
    step.rows.log(5)
    step.write(everything)
    assert step.bytes() != expected
    step.rows.restore(rejected)
    assert step.bytes() == expected
    assert_slots(step)
    # What was kept is used up: a step that keeps nothing puts nothing back.
    step.slots = [slots.clone() for slots in step.given]
    step.write(everything)
    written = step.bytes()
    step.rows.restore(rejected)
    assert step.bytes() == written


def test_rejected_drafts_become_zeros_and_nothing_else_does(layout: Layout, rejected: Rejected) -> None:
    step = Step(layout, keep=False)
    everything = list(range(sum(step.lengths)))
    step.write(everything)
    written = [cache.clone() for cache in step.caches]
    step.zero(REJECTED_TOKENS)
    expected = step.bytes()
    for cache, content in zip(step.caches, written, strict=True):
        cache.copy_(content)
    step.rows.restore(rejected)
    assert step.bytes() == expected
    assert_slots(step)


def test_a_row_that_was_not_restored_is_found_by_layer_and_slot(layout: Layout, rejected: Rejected) -> None:
    step = Step(layout, keep=True)
    step.rows.log(5)
    step.write(list(range(sum(step.lengths))))
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
    with pytest.raises(UnknownLayout, match="of a layer, .* two dimensions of runs at most"):
        as_rows("a layer", cache, 1, 3)


@pytest.mark.parametrize(("dtype", "size", "word"), [(torch.bfloat16, 8, 16), (torch.int8, 12, 4), (torch.int8, 7, 1)])
def test_words_divide_whatever_a_row_begins_at(dtype: Any, size: int, word: int) -> None:
    cache = torch.zeros(6, 2, BLOCK, 3, size, dtype=dtype)
    assert CacheRows("a layer", 0, as_rows("a layer", cache, 0, 2)).word == word
