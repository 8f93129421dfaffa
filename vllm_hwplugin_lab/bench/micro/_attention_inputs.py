# SPDX-License-Identifier: Apache-2.0
"""Paged caches of random numbers, and batches over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._attention_cases import AttentionCase

DTYPE = torch.bfloat16
#: Elements that are drawn at once: the generator works in float32.
_CHUNK = 1 << 28


@dataclass(frozen=True)
class Batch:
    """One set of inputs, with the kernel's output.

    Attributes:
        query, output: ``[tokens, heads, head_size]``; the output is NaN before the launch.
        keys, values: ``[blocks, page, kv_heads, head_size]``, the whole cache.
        block_table: ``[batch, blocks of the longest request]`` int32, in no order; no block is in two sets. Behind
            those of a shorter request it is 0.
        query_start_loc: ``[batch + 1]`` int32.
        seq_lens: ``[batch]`` int32.
    """

    case: AttentionCase
    query: Any
    output: Any
    keys: Any
    values: Any
    block_table: Any
    query_start_loc: Any
    seq_lens: Any

    @property
    def scale(self) -> float:
        return float(self.case.head_size**-0.5)

    def gathered(self, request: int) -> tuple[Any, Any]:
        """The keys and the values of a request, ``[its length, kv_heads, head_size]`` each, contiguous."""
        length, pages = self.case.lengths[request], self.case.pages[request]
        rows = self.block_table[request, :pages].long()
        keys, values = (cache[rows].flatten(0, 1)[:length] for cache in (self.keys, self.values))
        return keys, values


class Pool:
    """Keys and values for all cases: every batch reads blocks of the same two buffers.

    Args:
        elements: of the keys alone.
    """

    def __init__(self, elements: int, device: Any, seed: int) -> None:
        self.elements = elements
        self._device = device
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._keys, self._values = self._normal(elements), self._normal(elements)
        self._orders: dict[tuple[int, int, int], Any] = {}

    def sets(self, case: AttentionCase) -> int:
        """How many sets of inputs have blocks of their own."""
        return self.elements // case.cache_elements

    def batches(self, case: AttentionCase, count: int) -> list[Batch]:
        """``count`` sets of inputs over different blocks, no more than ``sets`` says."""
        block = case.page * case.kv_heads * case.head_size
        blocks, needed = self.elements // block, sum(case.pages)
        shape = (blocks, case.page, case.kv_heads, case.head_size)
        keys, values = (cache[: blocks * block].view(shape) for cache in (self._keys, self._values))
        order = self._order(case, blocks)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self._device) * case.query
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=self._device)
        pages = torch.tensor(case.pages, device=self._device)
        used = torch.arange(max(case.pages), device=self._device) < pages[:, None]
        found = []
        for index in range(count):
            query = self._normal(case.tokens * case.heads * case.head_size).view(-1, case.heads, case.head_size)
            own = order[index * needed : (index + 1) * needed]
            table = torch.zeros_like(used, dtype=torch.int32).masked_scatter_(used, own)
            output = torch.full_like(query, torch.nan)
            found.append(Batch(case, query, output, keys, values, table, starts, lengths))
        return found

    def _order(self, case: AttentionCase, blocks: int) -> Any:
        key = (case.page, case.kv_heads, case.head_size)
        if key not in self._orders:
            order = torch.randperm(blocks, generator=self._random, device=self._device)
            self._orders[key] = order.to(torch.int32)
        return self._orders[key]

    def _normal(self, elements: int) -> Any:
        found = torch.empty(elements, dtype=DTYPE, device=self._device)
        for start in range(0, elements, _CHUNK):
            found[start : start + _CHUNK].normal_(generator=self._random)
        return found
