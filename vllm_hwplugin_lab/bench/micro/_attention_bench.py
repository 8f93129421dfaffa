# SPDX-License-Identifier: Apache-2.0
"""``bench attention`` on the device: time and error of a kernel on a shape of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...probe import Case, Request
from ...probe.inputs import Inputs
from ...probe.reference import Answer, answers, compare
from . import _attention_cases as cases
from ._attention_cases import AttentionCase
from ._supervise import Refused
from ._timer import Call, Copies, Timer

DTYPE = torch.bfloat16
#: Elements to draw in one call: the generator works in float32.
_CHUNK = 1 << 28


@dataclass(frozen=True)
class Batch:
    """A set of inputs, with the kernel's output.

    Attributes:
        query, output: ``[tokens, heads, head_size]``; the output is NaN before the launch.
        keys, values: ``[blocks, page, kv_heads, head_size]``, the whole cache.
        block_table: ``[batch, blocks of the longest request]`` int32, shuffled; no block is in two sets. Zero after the
            blocks of a shorter request.
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
        """Return keys and values of a request, contiguous ``[its length, kv_heads, head_size]``."""
        length, pages = self.case.lengths[request], self.case.pages[request]
        rows = self.block_table[request, :pages].long()
        keys, values = (cache[rows].flatten(0, 1)[:length] for cache in (self.keys, self.values))
        return keys, values

    def contiguous(self) -> tuple[Any, Any]:
        """Return all requests' keys and values, ``[sum of lengths, kv_heads, head_size]``."""
        parts = [self.gathered(request) for request in range(self.case.batch)]
        return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])


class Pool:
    """Keys and values for all cases: every batch reads blocks of the same two buffers."""

    def __init__(self, elements: int, device: Any, seed: int) -> None:
        self.elements = elements
        self._device = device
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._keys, self._values = self._normal(elements), self._normal(elements)

    def batches(self, case: AttentionCase, count: int) -> list[Batch]:
        """Return ``count`` sets of inputs over different blocks.

        The pool must be large enough.
        """
        shape = (-1, case.page, case.kv_heads, case.head_size)
        block = case.page * case.kv_heads * case.head_size
        keys, values = (cache[: self.elements // block * block].view(shape) for cache in (self._keys, self._values))
        order = torch.randperm(len(keys), generator=self._random, device=self._device).to(torch.int32)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self._device) * case.query
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=self._device)
        pages = torch.tensor(case.pages, device=self._device)
        used = torch.arange(max(case.pages), device=self._device) < pages[:, None]
        batches = []
        for own in order.split(sum(case.pages))[:count]:
            query = self._normal(case.tokens * case.heads * case.head_size).view(-1, case.heads, case.head_size)
            table = torch.zeros_like(used, dtype=torch.int32).masked_scatter_(used, own)
            output = torch.full_like(query, torch.nan)
            batches.append(Batch(case, query, output, keys, values, table, starts, lengths))
        return batches

    def _normal(self, elements: int) -> Any:
        tensor = torch.empty(elements, dtype=DTYPE, device=self._device)
        for part in tensor.split(_CHUNK):
            part.normal_(generator=self._random)
        return tensor


#: Does the work of a step that all layers share; the returned call launches, and returns ``[tokens, heads,
#: head_size]``.
Prepare = Callable[[Batch], Call]


def pool_elements(timer: Timer, keys: Sequence[str]) -> int:
    """Return a pool's elements for some cases, within this GPU's memory."""
    assert timer.l2_bytes is not None  # the attention kernels are only for CUDA
    wanted = max(cases.CASES[key].cache_elements for key in keys)
    # At least two sets of the smaller cases, and memory for kernels and reference.
    free, _ = torch.cuda.mem_get_info(timer.device)
    return min(max(wanted, 4 * timer.l2_bytes), int(free * 0.6) // 4)


class AttentionBench:
    """Measure cells over a pool of ``pool_elements`` keys; larger cases are refused."""

    def __init__(
        self, timer: Timer, copies: Copies, seed: int, pool_elements: int, kernels: Mapping[str, Prepare]
    ) -> None:
        self._timer, self._copies = timer, copies
        self._pool = Pool(pool_elements, timer.device, seed)
        self._kernels = kernels
        self._inputs: tuple[str, list[Batch], list[Answer]] = ("", [], [])

    def measure(self, kernel: str, key: str) -> dict[str, Any]:
        """Measure the time and the error of a cell.

        Raises:
            Missing: The kernel is not on this host.
            Refused: The kernel does not support the case, or the pool is too small.
        """
        case = cases.CASES[key]
        if self._inputs[0] != key:
            # The kernels of a case are adjacent, and share its inputs and its reference.
            self._inputs = ("", [], [])
            room = self._pool.elements // case.cache_elements
            if not room:
                raise Refused(
                    f"it needs a cache of {case.cache_elements} elements, expected at most {self._pool.elements} on "
                    "this device"
                )
            batches = self._pool.batches(case, self._timer.sets(case.bytes_each, room * case.bytes_each))
            self._inputs = (key, batches, right(batches[-1]))
        _, batches, answers = self._inputs
        calls: list[Call] = [self._kernels[kernel](batch) for batch in batches]

        def spoil() -> None:
            for batch in batches:
                batch.output.fill_(torch.nan)

        facts, output = self._timer.measure(calls, spoil)
        ratio = compare(answers, looked_at(output, case)).ratio
        return {**facts, "copy_seconds": self._copies.seconds(case.kv_bytes), "error_ratio": ratio}


def right(batch: Batch) -> list[Answer]:
    """Return the reference of the requests that are `looked_at`."""
    case = batch.case
    requests = tuple(Request(case.query, case.lengths[index] - case.query) for index in _chosen(case))
    keys, values = zip(*(batch.gathered(index) for index in _chosen(case)), strict=True)
    shape = (case.head_size, case.heads, case.kv_heads, case.page)
    inputs = Inputs(looked_at(batch.query, case), keys, values, (), None, 0, None, None)
    return answers(Case(requests, "bfloat16", "auto", *shape), inputs)


def looked_at(tensor: Any, case: AttentionCase) -> Any:
    """Return the first, last, longest and shortest request's rows.

    ``tensor`` is ``[tokens, ...]``.
    """
    return tensor.unflatten(0, (case.batch, case.query))[_chosen(case)].flatten(0, 1)


def _chosen(case: AttentionCase) -> list[int]:
    lengths = case.lengths
    return sorted({0, case.batch - 1, lengths.index(max(lengths)), lengths.index(min(lengths))})
