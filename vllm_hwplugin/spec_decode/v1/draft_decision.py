# SPDX-License-Identifier: Apache-2.0
"""Decide what is captured for a drafter of the V1 runner, or why nothing.

A drafter's first pass reads every scheduled token of every request: 1 + k of them in a decode batch, more if the
drafter appends its own slots. The later passes read one token per request. vLLM pads both with one table, made of the
target's capture sizes, so a single request's one-token pass is padded to 1 + k. Here each query length has its own
table, counted in requests. The queries of a DFlash drafter are the last given token and k masks, in every batch, and
each sees the whole block (docs/drafter-graphs.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from vllm_hwplugin.spec_decode.builders import refusing
from vllm_hwplugin.spec_decode.capture_sizes import full_mixed_sizes, own_sizes
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS
from vllm_hwplugin.spec_decode.obstacles import Part, builder_classes, why_not

#: Tokens of a request in every pass of an autoregressive drafter but the first.
STEP_QUERY_LEN = 1


def request_ladder(capture_sizes: Iterable[int], target_query_len: int, max_num_seqs: int) -> tuple[int, ...]:
    """Return the request counts of the target's graphs of uniform batches.

    They ascend. The drafter then has a graph wherever the target runs one of the sizes. `max_num_seqs` itself is added,
    so that the fullest batch has a graph if it lies between two capture sizes.

    Args:
        capture_sizes: `cudagraph_capture_sizes`, in tokens.
        target_query_len: tokens per request in a uniform batch of the target (1 + num_speculative_tokens).
    """
    sizes = tuple(capture_sizes)
    rungs = {size // target_query_len for size in sizes if size % target_query_len == 0}
    rungs = {rung for rung in rungs if 1 <= rung <= max_num_seqs}
    if sizes and max_num_seqs * target_query_len <= max(sizes):
        rungs.add(max_num_seqs)
    return tuple(sorted(rungs))


def pad_up(ladder: Sequence[int], count: int) -> int | None:
    """Return the smallest rung that holds `count`, or None."""
    index = bisect_left(ladder, count)
    return ladder[index] if count > 0 and index < len(ladder) else None


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """The shapes that are captured, by query length.

    Attributes:
        uniform: query length in tokens -> request counts, ascending.
        mixed: token counts of batches whose rows differ in length, ascending; empty if the mode has no such graphs.
        max_num_seqs: rows of a mixed graph, at most.
    """

    uniform: Mapping[int, tuple[int, ...]]
    mixed: tuple[int, ...]
    max_num_seqs: int

    def find(self, num_tokens: int, query_len: int | None) -> GraphShape | None:
        """Return the captured shape for this batch; `query_len` None if rows differ."""
        if query_len is not None and num_tokens % query_len == 0:
            num_reqs = pad_up(self.requests(query_len), num_tokens // query_len)
            if num_reqs is not None:
                return uniform_shape(query_len, num_reqs)
        padded = pad_up(self.mixed, num_tokens)
        return None if padded is None else self._mixed_shape(padded)

    def requests(self, query_len: int) -> tuple[int, ...]:
        """Return the request counts, ascending, of this query length's graphs."""
        return self.uniform.get(query_len, ())

    def all(self) -> tuple[GraphShape, ...]:
        """Return every shape, largest first: later captures can reuse earlier ones' memory."""
        shapes = [uniform_shape(query_len, rung) for query_len, ladder in self.uniform.items() for rung in ladder]
        shapes += [self._mixed_shape(size) for size in self.mixed]
        return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True))

    def largest(self, num_reqs: int) -> DraftKeys:
        """Return each kind's largest shape, and the largest uniform up to `num_reqs`.

        Smaller shapes use the memory of the largest.
        """
        tops = {
            query_len: tuple(sorted({ladder[-1], *[rung for rung in ladder if rung <= num_reqs][-1:]}))
            for query_len, ladder in self.uniform.items()
            if ladder
        }
        return DraftKeys(tops, self.mixed[-1:], self.max_num_seqs)

    def _mixed_shape(self, num_tokens: int) -> GraphShape:
        return GraphShape(num_tokens=num_tokens, num_reqs=min(num_tokens, self.max_num_seqs), query_len=None)


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass of one drafter.

    Attributes:
        query_len: tokens of a request in a decode batch; with `masks` in every batch.
        max_tokens: tokens that the drafter's buffers hold.
        masks: whether batches with prefill have that shape too, and the model is called only with token ids and
            positions.
        causal: whether a query sees only earlier queries.
    """

    query_len: int
    max_tokens: int
    masks: bool = False
    causal: bool = True


def rows_held(table: torch.Tensor) -> int:
    """Return how many rows `table`'s storage holds; int32 [batch, blocks]."""
    available = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    width = (table.shape[1] - 1) * table.stride(1) + 1
    return int((available - width) // table.stride(0)) + 1


def drafter_obstacle(proposer: Any, target_mode: CUDAGraphMode, *, together: bool = True) -> str | None:
    """Return why no batch of the drafter can use graphs, or None."""
    if not target_mode.has_full_cudagraphs():
        return f"the target's cudagraph_mode is {target_mode.name}, and the drafter follows it"
    return why_not(proposer, Part.V1_PASSES, together=together)


def plan_before_capture(proposer: Any, target_mode: CUDAGraphMode) -> DraftKeys | str:
    """Return the most that a proposer could capture, or why nothing."""
    return drafter_obstacle(proposer, target_mode) or _planned(proposer, target_mode, None)


def plan_at_capture(proposer: Any, target_mode: CUDAGraphMode, template: Any) -> DraftKeys | str:
    """Return the shapes to capture with attention groups, or why none."""
    reason = drafter_obstacle(proposer, target_mode) or _attention_obstacle(proposer)
    if reason is not None:
        return reason
    thresholds = [group.get_metadata_builder().reorder_batch_threshold for group in proposer.draft_attn_groups]
    keys = _planned(proposer, target_mode, min((size for size in thresholds if size is not None), default=None))
    if isinstance(keys, str):
        return keys
    if template is None:
        return "the runner built no attention metadata for the drafter's KV-cache group while capturing"
    rows, held = max(shape.num_reqs for shape in keys.all()), rows_held(template.block_table_tensor)
    return keys if rows <= held else f"the largest graph has {rows} rows, and the drafter's block table holds {held}"


def _planned(proposer: Any, target_mode: CUDAGraphMode, decode_threshold: int | None) -> DraftKeys | str:
    config, spec = proposer.vllm_config, proposer.speculative_config
    compilation = config.compilation_config
    sizes, own = tuple(compilation.cudagraph_capture_sizes or ()), tuple(own_sizes(compilation) or ())
    # Not the target's largest sizes: a drafter's graphs have their own memory.
    most = max((*own, MAX_NUM_REQS * (1 + spec.num_speculative_tokens)))
    has_mixed = target_mode.mixed_mode() == CUDAGraphMode.FULL or full_mixed_sizes(compilation)
    keys = plan_keys(
        first_pass_of(proposer),
        tuple(size for size in sizes if size <= most),
        spec.num_speculative_tokens,
        config.scheduler_config.max_num_seqs,
        mixed=own if has_mixed else (),
        steps=spec.num_speculative_tokens > 1 and not proposer.parallel_drafting,
        decode_threshold=decode_threshold,
    )
    return keys if keys.all() else "no capture size holds a whole batch of the drafter"


def _attention_obstacle(proposer: Any) -> str | None:
    builders = builder_classes(proposer)
    if not builders:
        return "the drafter has no attention groups"
    refused = refusing(builders, "passes")
    if refused is not None:
        return f"no graph may hold the draft layers' attention ({refused})"
    refused = None if first_pass_of(proposer).causal else refusing(builders, "non_causal")
    return None if refused is None else f"no graph may hold the draft layers' non-causal attention ({refused})"


def first_pass_of(proposer: Any) -> FirstPass:
    num_speculative_tokens = proposer.speculative_config.num_speculative_tokens
    if proposer.speculative_config.method in MASK_METHODS:
        return FirstPass(
            query_len=1 + num_speculative_tokens,
            max_tokens=proposer.max_query_tokens,
            masks=True,
            # Before 0.23.0 vLLM knows only non-causal drafts.
            causal=getattr(proposer, "dflash_causal", False),
        )
    return FirstPass(
        query_len=1 + num_speculative_tokens + proposer.net_num_new_slots_per_request,
        max_tokens=min(proposer.max_num_tokens, proposer.max_positions),
    )


def plan_keys(
    first: FirstPass,
    capture_sizes: Sequence[int],
    num_speculative_tokens: int,
    max_num_seqs: int,
    *,
    mixed: Sequence[int],
    steps: bool,
    decode_threshold: int | None,
) -> DraftKeys:
    """Return the target's shapes that the drafter's attention and buffers support.

    Args:
        capture_sizes: sizes of the target's decode batches, in tokens.
        mixed: sizes, in tokens, of batches that mix prefill and decode, if the target has FULL graphs of them.
        decode_threshold: the longest query that every attention backend treats as decode; None for no limit.
    """
    ladder = request_ladder(capture_sizes, 1 + num_speculative_tokens, max_num_seqs)
    uniform: dict[int, tuple[int, ...]] = {STEP_QUERY_LEN: ladder} if steps else {}
    if decode_threshold is None or first.query_len <= decode_threshold:
        uniform[first.query_len] = tuple(rung for rung in ladder if rung * first.query_len <= first.max_tokens)
    sizes = () if first.masks else tuple(sorted(size for size in mixed if size <= first.max_tokens))
    return DraftKeys(uniform, sizes, max_num_seqs)
