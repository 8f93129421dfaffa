# SPDX-License-Identifier: Apache-2.0
"""Which batch sizes of a DFlash engine are captured: whole blocks, for every number of requests up to the limit.

In a decode step each request brings one block of 1 + k tokens, and vLLM finds a FULL graph by the exact multiple. Its
own list counts tokens, ends at 512 of them (64 requests of 8), and is rounded to blocks afterwards. This one counts
requests, up to a number of tokens that is safe without asking. Pure arithmetic: no torch, no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Sizes in one octave of request counts. A batch is padded by less than the inverse of it.
_RUNGS_PER_OCTAVE = 8

#: Tokens of the largest size that the user did not ask for: 256 requests of 8. Going on to the 1024 requests that vLLM
#: takes on large GPUs has a price. Under FlashAttention 3 vLLM allows every batch up to the largest size, captured or
#: not, 32 splits, with float32 buffers of [splits, heads, tokens, head size]: 1 GiB at 2048 tokens and 32 heads of 128,
#: 8 GiB at 16384, once in the target's graphs and once in the drafter's, and memory profiling runs without attention.
#: Batches that mix prefill and decode would be padded by up to an eighth, where the device is busy anyway.
LARGEST_DEFAULT = 2048


@dataclass(frozen=True, slots=True)
class Dropped:
    """A size that the user gave and that is not captured."""

    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """What to capture.

    Attributes:
        sizes: in tokens, ascending; empty where not even one block fits below the limits.
        dropped: the user's sizes that are not among them, ascending.
        replaced: the user gave sizes, none could be kept, and `sizes` are others.
    """

    sizes: tuple[int, ...]
    dropped: tuple[Dropped, ...] = ()
    replaced: bool = False


def capture_sizes(
    block: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    user_sizes: Sequence[int] | None = None,
    user_max: int | None = None,
    *,
    default_sizes: Iterable[int] = (),
) -> CaptureSizes:
    """The capture sizes of a DFlash engine.

    Every request count up to 16 has a size of its own, then eight counts an octave, so that less than an eighth of a
    batch is padding; the fullest batch has one too, unless it has more than `LARGEST_DEFAULT` tokens and the user set
    no `max_cudagraph_capture_size`. Sizes that the user gave are taken instead, as far as they are whole blocks. Where
    none of them is, the sizes up to the largest one given are captured, at least a single block. The result, given back
    as the user's sizes, comes out unchanged.

    Args:
        block: tokens of a request in a decode step, 1 + num_speculative_tokens.
        max_num_seqs: requests in a batch, at most.
        max_num_batched_tokens: tokens in a batch, at most.
        user_sizes: the user's `cudagraph_capture_sizes` in tokens, None where there are none.
        user_max: the user's `max_cudagraph_capture_size` in tokens, None where there is none.
        default_sizes: what vLLM captures by itself, in tokens. Those above the fullest decode batch serve batches that
            mix prefill and decode, so they stay, rounded up to blocks. Without meaning where the user gave sizes.
    """
    limit = max_num_batched_tokens if user_max is None else min(max_num_batched_tokens, user_max)
    if user_sizes is None:
        ladder = _ladder(block, max_num_seqs, limit if user_max is not None else min(limit, LARGEST_DEFAULT))
        rounded = {-(-size // block) * block for size in default_sizes if size > (ladder[-1] if ladder else 0)}
        return CaptureSizes(tuple(sorted({*ladder, *(size for size in rounded if size <= limit)})))

    given = sorted(set(user_sizes))
    dropped = tuple(
        Dropped(size, reason)
        for size in given
        if (reason := _why_dropped(size, block, max_num_batched_tokens, user_max)) is not None
    )
    kept = tuple(sorted(set(given) - {item.size for item in dropped}))
    if kept or not given:
        return CaptureSizes(kept, dropped)
    return CaptureSizes(_ladder(block, max_num_seqs, min(limit, max(block, given[-1]))), dropped, replaced=True)


def explain(found: CaptureSizes, block: int) -> str | None:
    """One line about the user's sizes that are not captured, each with its reason; None where all of them are."""
    if not found.dropped:
        return None
    by_reason: dict[str, list[str]] = {}
    for item in found.dropped:
        by_reason.setdefault(item.reason, []).append(str(item.size))
    lost = "; ".join(f"{', '.join(sizes)} ({reason})" for reason, sizes in by_reason.items())
    if not found.replaced:
        return f"of the given cudagraph_capture_sizes these are dropped: {lost}"
    return (
        f"none of the given cudagraph_capture_sizes can be kept: {lost}; "
        f"multiples of {block} up to the largest one take their place"
    )


def describe(sizes: Sequence[int], block: int, max_num_seqs: int) -> str:
    """The sizes in one phrase, for the log and the journal."""
    covered = min(sizes[-1] // block, max_num_seqs)
    more = "; max_cudagraph_capture_size takes a larger bound" if covered < max_num_seqs else ""
    return (
        f"{len(sizes)} capture sizes in blocks of {block} tokens, up to {sizes[-1]} tokens "
        f"({covered} of {max_num_seqs} requests{more})"
    )


def _why_dropped(size: int, block: int, max_num_batched_tokens: int, user_max: int | None) -> str | None:
    if size < block or size % block:
        return f"not a multiple of 1 + num_speculative_tokens = {block}"
    if size > max_num_batched_tokens:
        return f"more than max_num_batched_tokens = {max_num_batched_tokens}"
    if user_max is not None and size > user_max:
        return f"more than max_cudagraph_capture_size = {user_max}"
    return None


def _ladder(block: int, max_num_seqs: int, limit: int) -> tuple[int, ...]:
    return tuple(count * block for count in _request_counts(min(max_num_seqs, limit // block)))


def _request_counts(top: int) -> Iterator[int]:
    """Ascending from 1 to `top`: all up to 16, then eight an octave."""
    count = 1
    while count < top:
        yield count
        octave = 1 << (count.bit_length() - 1)
        count += max(1, octave // _RUNGS_PER_OCTAVE)
    if top > 0:
        yield top
