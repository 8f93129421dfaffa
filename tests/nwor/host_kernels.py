# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``csrc`` for draft rows on a CPU: like those, they read and write by the table's addresses."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import torch

_BYTES_OF_AN_INT64 = 8


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Register them for the CPU."""
    library = torch.library.Library("hwplugin", "IMPL")
    library.impl("log_draft_rows", _log, "CPU")
    library.impl("restore_draft_rows", _restore, "CPU")
    yield
    library._destroy()


def _log(table: Any, log: Any, slots: Any, query_start_loc: Any, num_reqs: int, drafts: int, word: int) -> None:
    _check(table, log, slots, num_reqs * drafts)
    for row, token in enumerate(_tokens(query_start_loc, num_reqs, drafts)):
        for layer, line in enumerate(table.tolist()):
            slots[layer, row] = slot = _slot(line, token)
            if slot >= 0:
                for address, kept, size in _runs(line, slot, log[row], word):
                    ctypes.memmove(kept, address, size)


def _restore(
    table: Any,
    log: Any,
    slots: Any,
    query_start_loc: Any,
    num_rejected: Any,
    sampled: Any,
    ends: Any,
    num_reqs: int,
    drafts: int,
    word: int,
) -> None:
    assert all(one is None or one.dtype == torch.int32 for one in (num_rejected, sampled, ends))
    if num_rejected is None:
        verified = ends[:num_reqs].diff(prepend=ends.new_zeros(1))
        num_rejected = torch.minimum(verified, verified + 1 - (sampled != -1).sum(1))
    if log is not None:
        _check(table, log, slots, num_reqs * drafts)
    lines = table.tolist()
    for row, token in enumerate(_tokens(query_start_loc, num_reqs, drafts)):
        rejected = drafts - row % drafts <= int(num_rejected[row // drafts])
        where = [_slot(line, token) for line in lines] if slots is None else slots[:, row].tolist()
        if slots is not None:
            slots[:, row] = -1
        for line, slot in zip(lines, where, strict=True):
            if rejected and slot >= 0:
                for address, kept, size in _runs(line, slot, None if log is None else log[row], word):
                    ctypes.memset(address, 0, size) if kept is None else ctypes.memmove(address, kept, size)
            if rejected and token >= 0 and (slot >= 0 or slots is None):
                _mapping(line, token).value = -1


def _check(table: Any, log: Any, slots: Any, rows: int) -> None:
    assert (table.dtype, log.dtype, slots.dtype) == (torch.int64, torch.uint8, torch.int64)
    assert len(log) >= rows
    assert slots.shape == (len(table), len(log))


def _tokens(query_start_loc: Any, num_reqs: int, drafts: int) -> Iterator[int]:
    assert query_start_loc.dtype == torch.int32
    starts = query_start_loc[: num_reqs + 1].tolist()
    for first, end in itertools.pairwise(starts):
        yield from (token if token > first else -1 for token in range(end - drafts, end))


def _mapping(line: list[int], token: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(line[1] + _BYTES_OF_AN_INT64 * token)


def _slot(line: list[int], token: int) -> int:
    slot = -1 if token < 0 else _mapping(line, token).value
    return slot if slot < line[11] else -1


def _runs(line: list[int], slot: int, kept: Any, word: int) -> Iterator[tuple[int, int | None, int]]:
    """Addresses in the cache and among what is kept, and bytes; all of them whole words."""
    base, _, block_size, block, token, outer, outer_stride, inner, inner_stride, run, at, _ = line
    row = base + slot // block_size * block + slot % block_size * token
    for index in range(outer * inner):
        address = row + index // inner * outer_stride + index % inner * inner_stride
        offset = at + index * run
        assert address % word == offset % word == run % word == 0, "no whole words"
        assert kept is None or offset + run <= len(kept)
        yield address, None if kept is None else kept.data_ptr() + offset, run
