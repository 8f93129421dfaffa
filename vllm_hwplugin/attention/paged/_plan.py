# SPDX-License-Identifier: Apache-2.0
"""The programs of a batch: pure decisions from bounds that the host knows, so that a launch can be captured."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final, TypeAlias

MAX_SPLITS: Final = 128
"""Of one row. The kernels that merge splits rely on it."""

SCRATCH_ROWS: Final = 32768
"""Rows of split results in the scratch memory, each of a head's size: 64 MiB at 512."""

Heights: TypeAlias = tuple[tuple[int, int], ...]
"""Rows of a kernel's tiles, ascending, and how many programs with each share a multiprocessor."""

# A further split costs a row to write and to merge, so it must save this part of the time.
_WORTH: Final = 0.05


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Args:
        rows: of a block of queries, a token and a head each: the height of a program's tile.
        tokens: of a request in a block of queries: ``rows`` divided by the heads that share a KV head.
        blocks: of queries in the batch.
        blocks_per_request: if equal for all requests; 0 if programs search for their request.
        splits: most splits of the keys of a block of queries. The device gives short requests fewer.
        max_query_len: most tokens of a request.
        batch_invariant: keys are not split.
    """

    rows: int
    tokens: int
    blocks: int
    blocks_per_request: int
    splits: int
    max_query_len: int
    batch_invariant: bool


# All layers of a step ask for the same plan.
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
    """Plan a batch from upper bounds of requests, tokens and longest query.

    Args:
        heights: of the kernel's tiles.
        num_requests: rows of the block table, with padding.
        max_query_len: tokens of a request.
        batch_invariant: a row is computed alike in every batch: one tile height, and no split.
    """
    group = num_heads // num_kv_heads
    fitting = [tile for tile in heights if max(max_query_len, 1) * group <= tile[0]]
    rows, together = heights[-1] if batch_invariant or not fitting else fitting[0]
    tokens = rows // group
    per_request = -(-max_query_len // tokens)
    # If requests differ in length, most blocks of an even division are empty.
    even, searched = num_requests * per_request, num_tokens // tokens + num_requests
    search = even > 2 * searched
    blocks = searched if search else even
    splits = 1 if batch_invariant or blocks == 0 else _splits(blocks * num_kv_heads, rows, multiprocessors * together)
    return LaunchPlan(rows, tokens, blocks, 0 if search else per_request, splits, max_query_len, batch_invariant)


def _splits(programs: int, rows: int, at_once: int) -> int:
    """Return the number of splits that ends soonest."""
    # The device runs `at_once` programs at a time.
    most = min(MAX_SPLITS, SCRATCH_ROWS // (programs * rows))
    if most < 2:
        return 1
    # More and shorter splits cost nothing within a round, so only the largest number of each round counts.
    first = -(-programs // at_once)
    choices = [min(most, number * at_once // programs) for number in range(first, first + most)]
    times = [-(-programs * splits // at_once) / splits for splits in choices]
    best = min(times)
    return next(splits for splits, time in zip(choices, times, strict=True) if time <= best * (1 + _WORTH))


# A single request has all programs. More than twice the programs that the device runs at a time fill it by themselves,
# and each program would look at all requests.
_FEWEST: Final = 2
_MOST: Final = 2
# Programs for each request, within so many rounds, so that a long request ends with the others.
_SPARE: Final = 3
_ROUNDS: Final = 3


@dataclasses.dataclass(frozen=True)
class Balance:
    """What the device needs to distribute keys over programs (csrc/paged_attention/balance.cuh).

    Args:
        splits: most splits of a request, so that their results fit into the scratch memory.
        programs: of a KV head; 0 if all blocks of queries are split alike.
        at_once: how many programs of a KV head the device runs at a time.
    """

    splits: int
    programs: int
    at_once: int


# All layers of a step ask for the same balance.
@functools.lru_cache(maxsize=1024)
def balance(plan: LaunchPlan, *, group: int, num_kv_heads: int, multiprocessors: int) -> Balance:
    """Bound a batch's programs, if each request has one block of queries.

    Other batches are split alike.

    Args:
        plan: for tiles that fill a multiprocessor.
        group: query heads that share a KV head.
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
