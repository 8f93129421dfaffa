# SPDX-License-Identifier: Apache-2.0
"""Which batch shapes of a drafter get a FULL CUDA graph, and how a batch is padded to one.

Pure data and arithmetic: no torch, no vLLM. A drafter runs two kinds of pass. The first reads every scheduled token of
every request (1 + k of them in a decode batch; more where the drafter appends slots of its own). The later ones read
one token a request. vLLM pads both with one table, made of the target's capture sizes, so that a single request's
one-token pass is padded to 1 + k. Here each query length has its own table, counted in requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Tokens of a request in every pass of an autoregressive drafter but the first.
STEP_QUERY_LEN = 1


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A captured batch shape: `num_tokens` tokens in `num_reqs` rows of `query_len` tokens (None: of any length)."""

    num_tokens: int
    num_reqs: int
    query_len: int | None


def uniform_shape(query_len: int, num_reqs: int) -> DraftShape:
    return DraftShape(num_tokens=query_len * num_reqs, num_reqs=num_reqs, query_len=query_len)


def request_ladder(capture_sizes: Iterable[int], target_query_len: int, max_num_seqs: int) -> tuple[int, ...]:
    """Request counts, ascending, at which a uniform batch of the target has a graph.

    The drafter then has one wherever the target has. `max_num_seqs` itself is added, so that the fullest batch does not
    fall off the ladder when it lies between two capture sizes.

    Args:
        capture_sizes: `cudagraph_capture_sizes`, in tokens.
        target_query_len: tokens a request in a uniform batch of the target (1 + num_speculative_tokens).
        max_num_seqs: the scheduler's limit on requests in a batch.
    """
    sizes = tuple(capture_sizes)
    rungs = {size // target_query_len for size in sizes if size % target_query_len == 0}
    rungs = {rung for rung in rungs if 1 <= rung <= max_num_seqs}
    if sizes and max_num_seqs * target_query_len <= max(sizes):
        rungs.add(max_num_seqs)
    return tuple(sorted(rungs))


def pad_up(ladder: Sequence[int], count: int) -> int | None:
    """The smallest rung that holds `count`, or None where none does."""
    index = bisect_left(ladder, count)
    return ladder[index] if count > 0 and index < len(ladder) else None


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """The shapes that are captured, by query length.

    Attributes:
        uniform: query length in tokens -> request counts, ascending.
        mixed: token counts of batches whose rows differ in length, ascending; empty where the mode has no such graphs.
        max_num_seqs: rows of a mixed graph, at most.
    """

    uniform: Mapping[int, tuple[int, ...]]
    mixed: tuple[int, ...]
    max_num_seqs: int

    def find(self, num_tokens: int, query_len: int | None) -> DraftShape | None:
        """The captured shape to pad this batch to, or None where there is no graph for it.

        Args:
            num_tokens: tokens in the batch.
            query_len: tokens of every request in it; None where they differ.
        """
        if query_len is not None and num_tokens % query_len == 0:
            num_reqs = pad_up(self.requests(query_len), num_tokens // query_len)
            if num_reqs is not None:
                return uniform_shape(query_len, num_reqs)
        padded = pad_up(self.mixed, num_tokens)
        return None if padded is None else self._mixed_shape(padded)

    def requests(self, query_len: int) -> tuple[int, ...]:
        """Request counts, ascending, of the graphs for this query length; empty where there are none."""
        return self.uniform.get(query_len, ())

    def all(self) -> tuple[DraftShape, ...]:
        """Every shape, largest first, so that later captures can reuse the memory pool of earlier ones."""
        shapes = [uniform_shape(query_len, rung) for query_len, ladder in self.uniform.items() for rung in ladder]
        shapes += [self._mixed_shape(size) for size in self.mixed]
        return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True))

    def _mixed_shape(self, num_tokens: int) -> DraftShape:
        return DraftShape(num_tokens=num_tokens, num_reqs=min(num_tokens, self.max_num_seqs), query_len=None)
