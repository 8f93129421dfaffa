# SPDX-License-Identifier: Apache-2.0
"""Why decode shapes miss their share of the copy bandwidth, as far as the figures of one run say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.micro import bandwidth, find

from ._goals import DECODE_SHARE

#: Bytes of keys and values below which a plain copy too is far from the bandwidth of a large one.
SMALL_BYTES = 32 << 20
#: Rows that share a key: from here on the products of a key cost more than its way from memory.
MANY_ROWS = 128


@dataclass(frozen=True)
class Miss:
    """One shape below `DECODE_SHARE`.

    Attributes:
        share: of the large copy's bandwidth.
        copy_share: the same of a copy that moves as many bytes; None where it was not measured.
        speed: FLOP/s.
        needed: FLOP/s at `DECODE_SHARE` of the bandwidth.
    """

    case: attention.AttentionCase
    share: float
    copy_share: float | None
    speed: float
    needed: float


@dataclass(frozen=True)
class Misses:
    """Every shape that misses, in one of three groups: the first that fits.

    Attributes:
        small: keys and values are fewer than `SMALL_BYTES`.
        arithmetic: `MANY_ROWS` rows or more share a key.
        rest: neither.
        prefill: the most FLOP/s of the same kernel in a prefill: what its arithmetic can do. None if not measured.
    """

    small: tuple[Miss, ...]
    arithmetic: tuple[Miss, ...]
    rest: tuple[Miss, ...]
    prefill: float | None


def rows(case: attention.AttentionCase) -> int:
    """Rows of the score matrix that share a key."""
    return case.query * case.heads // case.kv_heads


def misses(results: Mapping[str, Any]) -> Misses:
    found = [miss for case in attention.DECODE if (miss := _miss(results, case)) is not None]
    small = tuple(one for one in found if one.case.kv_bytes < SMALL_BYTES)
    arithmetic = tuple(one for one in found if one not in small and rows(one.case) >= MANY_ROWS)
    rest = tuple(one for one in found if one not in small and one not in arithmetic)
    speeds = [
        case.flops / cell["seconds"]
        for case in attention.PREFILL
        if (cell := find(results, attention.OURS, case.key)) is not None
    ]
    return Misses(small, arithmetic, rest, max(speeds, default=None))


def _miss(results: Mapping[str, Any], case: attention.AttentionCase) -> Miss | None:
    cell = find(results, attention.OURS, case.key)
    if cell is None:
        return None
    copy = bandwidth(results, cell)
    share = case.kv_bytes / cell["seconds"] / copy
    if share >= DECODE_SHARE:
        return None
    same = None if cell["copy_seconds"] is None else case.kv_bytes / cell["copy_seconds"] / copy
    needed = case.flops / (case.kv_bytes / (DECODE_SHARE * copy))
    return Miss(case, share, same, case.flops / cell["seconds"], needed)
