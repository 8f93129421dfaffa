# SPDX-License-Identifier: Apache-2.0
"""How many programs share the keys of a batch out among themselves: bounds, as only the device knows the lengths."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from ._plan import MAX_SPLITS, SCRATCH_ROWS, LaunchPlan

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
