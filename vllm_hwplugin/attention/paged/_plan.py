# SPDX-License-Identifier: Apache-2.0
"""How a batch is cut into programs: pure decisions from bounds that the host knows, so that it can be captured."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final, TypeAlias

MAX_SPLITS: Final = 128
"""Of one row. The kernels that merge them count on it."""

SCRATCH_ROWS: Final = 32768
"""Rows of split results that the scratch memory holds, each of a head's size: 64 MiB at 512."""

Heights: TypeAlias = tuple[tuple[int, int], ...]
"""Rows of each tile that a kernel has, ascending, and how many programs with it share a multiprocessor."""

# A split more than needed is a row more to write and to merge; it has to save this part of the time.
_WORTH: Final = 0.05


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Args:
        rows: of a block of queries, a token and a head each: the height of a program's tile.
        tokens: of one request in a block of queries, ``rows`` divided by the heads that share a KV head.
        blocks: of queries in the batch.
        blocks_per_request: where every request has as many; 0 where programs search for their request.
        splits: of the keys of a block of queries, at most. A short request has fewer, which the device finds out.
        max_query_len: tokens of one request, at most.
        batch_invariant: keys are not split.
    """

    rows: int
    tokens: int
    blocks: int
    blocks_per_request: int
    splits: int
    max_query_len: int
    batch_invariant: bool


# All layers of a step ask for the same.
@functools.lru_cache(maxsize=1024)
def plan_launch(
    heights: Heights,
    *,
    num_requests: int,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    multiprocessors: int,
    batch_invariant: bool,
) -> LaunchPlan:
    """Cut a batch.

    The counts of requests and tokens and the longest query are upper bounds: a captured launch serves any batch within
    them.

    Args:
        heights: of the kernel's tiles.
        num_requests: rows of the block table, padding among them.
        num_tokens: of all requests.
        max_query_len: tokens of one request.
        num_heads: of the queries.
        num_kv_heads: of the cache.
        multiprocessors: of the device.
        batch_invariant: a row is computed alike whatever runs beside it: one tile for all batches, and no split.
    """
    group = num_heads // num_kv_heads
    fitting = [tile for tile in heights if max(max_query_len, 1) * group <= tile[0]]
    rows, together = heights[-1] if batch_invariant or not fitting else fitting[0]
    tokens = rows // group
    per_request = -(-max_query_len // tokens)
    # Where requests differ in length, most blocks of the even cut would be empty.
    even, searched = num_requests * per_request, num_tokens // tokens + num_requests
    search = even > 2 * searched
    blocks = searched if search else even
    splits = 1 if batch_invariant or blocks == 0 else _splits(blocks * num_kv_heads, rows, multiprocessors * together)
    return LaunchPlan(rows, tokens, blocks, 0 if search else per_request, splits, max_query_len, batch_invariant)


def _splits(programs: int, rows: int, at_once: int) -> int:
    """How many splits of each program end soonest, on a device that runs ``at_once`` of them at a time."""
    most = min(MAX_SPLITS, SCRATCH_ROWS // (programs * rows))
    if most < 2:
        return 1
    # In a round that starts anyway more and shorter splits cost nothing, so only the fullest of each count.
    first = -(-programs // at_once)
    choices = [min(most, number * at_once // programs) for number in range(first, first + most)]
    times = [-(-programs * splits // at_once) / splits for splits in choices]
    best = min(times)
    return next(splits for splits, time in zip(choices, times, strict=True) if time <= best * (1 + _WORTH))


# One request has all programs. More than twice as many as the device runs fill it by themselves, and each would have to
# look at all of them.
_FEWEST: Final = 2
_MOST: Final = 2
# Programs for each request, where there is room in so many rounds, so that a long one ends with the others.
_SPARE: Final = 3
_ROUNDS: Final = 3


@dataclasses.dataclass(frozen=True)
class Balance:
    """What the device needs to share keys out (csrc/paged_attention/balance.cuh).

    Args:
        splits: of a request, at most: the scratch memory has room for as many results.
        programs: of a KV head; 0 where all blocks of queries are split alike.
        at_once: of those, how many the device runs at a time.
    """

    splits: int
    programs: int
    at_once: int


# All layers of a step ask for the same.
@functools.lru_cache(maxsize=1024)
def balance(plan: LaunchPlan, *, group: int, num_kv_heads: int, multiprocessors: int) -> Balance:
    """Bound the programs of a batch in which every request has one block of queries; other batches are split alike.

    Args:
        plan: of the batch, for tiles of which a multiprocessor runs one.
        group: query heads that share a KV head.
        num_kv_heads: of the cache.
        multiprocessors: of the device.
    """
    alike = Balance(plan.splits, 0, 0)
    programs = plan.blocks * num_kv_heads
    if plan.batch_invariant or plan.blocks_per_request != 1:
        return alike
    if plan.blocks < _FEWEST or programs > _MOST * multiprocessors:
        return alike
    rows = plan.max_query_len * group
    splits = min(MAX_SPLITS, SCRATCH_ROWS // (programs * rows))
    at_once = max(multiprocessors // num_kv_heads, 1)
    if splits < 2:
        return alike
    return Balance(splits, min(1 + _SPARE * plan.blocks // at_once, _ROUNDS) * at_once, at_once)
