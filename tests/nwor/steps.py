# SPDX-License-Identifier: Apache-2.0
"""A step of a model runner on small caches of every layout, on any device, and what has to come of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_hwplugin.nwor.layout import CacheRows, as_rows
from vllm_hwplugin.nwor.rows import Batch, Rejected

DRAFTS, BLOCK = 3, 16


@dataclass(frozen=True)
class Layout:
    """A cache of 6 blocks: its shape, the order in which the dimensions lie in memory, and which count what."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block: int
    token: int
    dtype: Any = torch.bfloat16

    def make(self, device: str) -> Any:
        physical = [self.shape[i] for i in self.order]
        count = torch.Size(physical).numel() * self.dtype.itemsize
        flat = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device).view(self.dtype)
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
    "words of 4 bytes": Layout((6, 2, BLOCK, 3, 12), (0, 1, 2, 3, 4), 0, 2, torch.int8),
    "single bytes": Layout((6, 2, BLOCK, 3, 7), (0, 1, 2, 3, 4), 0, 2, torch.int8),
    "more words than a warp moves at once": Layout((6, 2, BLOCK, 9, 128), (0, 1, 2, 3, 4), 0, 2),
    "one head": Layout((6, 1, BLOCK, 16), (0, 1, 2, 3), 0, 2, torch.float32),
}


def row(layout: Layout, cache: Any, slot: int) -> Any:
    """A token's elements, by the dimensions that vLLM's writers index."""
    return cache.movedim((layout.block, layout.token), (0, 1))[slot // BLOCK, slot % BLOCK]


class Step:
    """Two layers of two KV cache groups; a batch of a prompt, of three requests with 3, 1 and 3 drafts, and padding.

    The prompt's first tokens are in no cache; the drafts of the third request have no slots in the second group. A
    third group is the drafter's alone.
    """

    lengths = (5, 4, 2, 4, 0)
    num_drafts = (0, 3, 1, 3, 0)
    everything = tuple(range(sum(lengths)))

    def __init__(self, layout: Layout, keep: bool, make: Callable[..., Any], device: str = "cpu") -> None:
        self.layout = layout
        self.caches = [layout.make(device), layout.make(device)]
        total = sum(self.lengths)
        order = torch.randperm(5 * BLOCK, device=device) + BLOCK
        # A draft that is rejected has the last slot.
        last = int(order.argmax())
        order[[REJECTED_TOKENS[0], last]] = order[[last, REJECTED_TOKENS[0]]]
        self.slots = [order[start : start + total].clone() for start in (0, total, 2 * total)]
        self.slots[0][:2] = -1
        self.slots[1][9:11] = -1
        self.given = [slots.clone() for slots in self.slots]
        starts = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        rows = [
            CacheRows(f"layer {group}", group, as_rows("a layer", cache, layout.block, layout.token))
            for group, cache in enumerate(self.caches)
        ]
        self.rows = make(rows, Batch(starts, dict(enumerate(self.slots)), 6, DRAFTS), keep)

    def bytes(self) -> list[bytes]:
        """What all caches hold, as memory."""
        empty = [torch.empty(0, dtype=torch.uint8, device=cache.device) for cache in self.caches]
        memory = [one.set_(cache.untyped_storage()) for one, cache in zip(empty, self.caches, strict=True)]
        return [one.cpu().numpy().tobytes() for one in memory]

    def write(self, tokens: Iterable[int]) -> None:
        self._fill({token: 0x41 + token for token in tokens})

    def zero(self, tokens: Iterable[int]) -> None:
        self._fill(dict.fromkeys(tokens, 0))

    def _fill(self, values: Mapping[int, int]) -> None:
        """All bytes of these tokens, on the host: a tool that watches each access of a device is slow in small ones."""
        for cache, mapping in zip(self.caches, self.slots[:2], strict=True):
            host, slots = cache.cpu(), mapping.tolist()
            assert host.stride() == cache.stride()
            for token, value in values.items():
                if slots[token] >= 0:
                    target = row(self.layout, host, slots[token])
                    raw = torch.full((target.numel() * cache.element_size(),), value, dtype=torch.uint8)
                    target.copy_(raw.view(cache.dtype).view(target.shape))
            cache.copy_(host)


def assert_restores(step: Step, log: Callable[[], None], restore: Callable[[], None]) -> None:
    """Between them a step writes its drafts; the caches are then as if it had never written those that are rejected."""
    before = [cache.clone() for cache in step.caches]
    step.write([token for token in step.everything if token not in REJECTED_TOKENS])
    expected = step.bytes()
    for cache, content in zip(step.caches, before, strict=True):
        cache.copy_(content)
    log()
    step.write(step.everything)
    assert step.bytes() != expected
    restore()
    assert step.bytes() == expected
    assert_slots(step)
    # What was kept is used up: a step that keeps nothing puts nothing back.
    for slots, given in zip(step.slots, step.given, strict=True):
        slots.copy_(given)
    step.write(step.everything)
    written = step.bytes()
    restore()
    assert step.bytes() == written


def assert_zeroes(step: Step, zero: Callable[[], None]) -> None:
    """Rejected drafts become zeros, and nothing else does."""
    step.write(step.everything)
    written = [cache.clone() for cache in step.caches]
    step.zero(REJECTED_TOKENS)
    expected = step.bytes()
    for cache, content in zip(step.caches, written, strict=True):
        cache.copy_(content)
    zero()
    assert step.bytes() == expected
    assert_slots(step)


def assert_passes_over_what_is_no_slot(step: Step, log: Callable[[], None], restore: Callable[[], None]) -> None:
    """Nothing is read or written for two rejected drafts that are mapped behind the caches; others are taken out."""
    before = [cache.clone() for cache in step.caches]

    def map_to(slot: int) -> None:
        step.slots[0][7] = step.slots[1][8] = slot

    def left_by(slot: int) -> list[bytes]:
        for cache, content in zip(step.caches, before, strict=True):
            cache.copy_(content)
        for slots, given in zip(step.slots, step.given, strict=True):
            slots.copy_(given)
        map_to(slot)
        log()
        map_to(-1)
        step.write(step.everything)
        map_to(slot)
        restore()
        return step.bytes()

    expected = left_by(-1)
    for slot in (6 * BLOCK, 1 << 40):
        assert left_by(slot) == expected


def assert_slots(step: Step) -> None:
    """Rejected drafts have none any more, all others theirs."""
    for slots, given in zip(step.slots, step.given, strict=True):
        expected = given.clone()
        expected[REJECTED_TOKENS] = -1
        assert slots.tolist() == expected.tolist()


# The last tokens of these requests: 9 to 11 would be 3 of the second request, whose tokens are 5 to 8.
REJECTED, REJECTED_TOKENS = [0, 2, 1, 3], [7, 8, 10, 12, 13, 14]
#: By what was sampled: nothing of a piece of the prompt, then one accepted draft, none, and none.
SAMPLED = [[-1, -1, -1, -1], [7, 8, -1, -1], [7, -1, -1, -1], [7, -1, -1, -1]]


def by_number(device: str = "cpu") -> Rejected:
    return Rejected(num_rejected=torch.tensor(REJECTED, dtype=torch.int32, device=device))


def by_sampled(device: str = "cpu") -> Rejected:
    ends = [*itertools.accumulate(Step.num_drafts[:4])]
    return Rejected(
        sampled_token_ids=torch.tensor(SAMPLED, dtype=torch.int32, device=device),
        cu_num_draft_tokens=torch.tensor(ends, dtype=torch.int32, device=device),
    )
