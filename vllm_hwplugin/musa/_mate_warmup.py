# SPDX-License-Identifier: Apache-2.0
"""Batches that need each kernel of mate that serving can need. Not run on MUSA hardware.

mate compiles a module of kernels at its first use, for seconds to minutes, by what it is called with: rows in a tile
(from the longest query), mask, layout of the keys, schedule. Which call needs which module is mate's own affair and
changes with its version. So the warm-up names no modules, as ``mate.jit.prewarm_modules`` wants. It makes calls, dense
enough to fall into every class: a call is cheap when its module is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def query_lengths(longest: int) -> list[int]:
    """Lengths that lie in every class of rows, where a class ends at a multiple of 32 rows up to 256.

    Rows are queries, or queries times the query heads of a KV head. The latter have ends less than 16 lengths apart
    only up to 64, so up to there it is each length.

    Args:
        longest: query that serving can have.
    """
    lengths = [*range(1, 65), *range(80, 289, 16)]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return sorted({min(length, longest) for length in lengths})


def dummy_batches(builder: Any, *, causal: bool, drafts: bool) -> Iterator[tuple[Any, bool]]:
    """Batches, each a ``CommonAttentionMetadata``, and whether a drafter's metadata is to be made of it.

    Args:
        builder: a metadata builder of the backend on MUSA.
        causal: of all of them.
        drafts: the builder is a drafter's, so there are no others.
    """
    config = builder.vllm_config
    longest = min(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens)
    decodes = min(builder.decode_len, longest)
    for length in query_lengths(longest):
        # A drafter's metadata has no schedule, as that of prompts and of a decode batch that fills the device has none.
        yield _batch(builder, 1, length, causal), True
        if not drafts and length <= decodes:
            yield _batch(builder, 1, length, causal), False
    if drafts:
        return
    # With a schedule the number of requests counts as well, at the ends of what a decode can be.
    for requests in range(2, config.scheduler_config.max_num_seqs + 1):
        found = [_batch(builder, requests, length, causal) for length in {1, decodes}]
        if not builder.build(0, found[0]).schedules:
            return
        yield from ((batch, False) for batch in found)


def _batch(builder: Any, requests: int, length: int, causal: bool) -> Any:
    """Requests of equal length and without context. All their blocks are the null block, which no request writes to."""
    config, device = builder.vllm_config, builder.device
    starts = torch.arange(requests + 1, dtype=torch.int32) * length
    lengths = torch.full((requests,), length, dtype=torch.int32)
    blocks = -(-config.model_config.max_model_len // builder.kv_cache_spec.block_size)
    known = inspect.signature(CommonAttentionMetadata).parameters
    bound = {"seq_lens_cpu_upper_bound": lengths} if "seq_lens_cpu_upper_bound" in known else {}
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        num_reqs=requests,
        num_actual_tokens=requests * length,
        max_query_len=length,
        max_seq_len=length,
        block_table_tensor=torch.zeros(requests, blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((requests * length,), -1, dtype=torch.int64, device=device),
        causal=causal,
        **bound,
    )
