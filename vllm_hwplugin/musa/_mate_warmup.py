# SPDX-License-Identifier: Apache-2.0
"""Batches that together use each of mate's kernels that serving can use. Not run on MUSA hardware.

mate compiles a module of kernels at its first use, for seconds to minutes, depending on the call: rows of a tile (from
the longest query), mask, layout of the keys, schedule. Which call needs which module changes with mate's version. So
the warm-up does not name modules, as ``mate.jit.prewarm_modules`` requires; it makes calls that cover every class. A
call is cheap if its module exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def query_lengths(longest: int) -> list[int]:
    """Return query lengths that cover all classes of rows.

    A class ends at a multiple of 32 rows, up to 256. Rows are queries, or queries × query heads per KV head. In the
    second case class ends are less than 16 lengths apart only up to length 64, so the result has every length up to
    there.

    Args:
        longest: The longest query that serving can have.
    """
    lengths = [*range(1, 65), *range(80, 289, 16)]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return sorted({min(length, longest) for length in lengths})


def dummy_batches(builder: Any, *, causal: bool, drafts: bool) -> Iterator[tuple[Any, bool]]:
    """Yield ``CommonAttentionMetadata``, and whether to build a drafter's metadata from it.

    Args:
        drafts: Whether the builder is a drafter's: then all batches are.
    """
    config = builder.vllm_config
    longest = min(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens)
    decodes = min(builder.decode_len, longest)
    for length in query_lengths(longest):
        # Metadata of drafters, of prompts and of decode batches that fill the device has no schedule.
        yield _batch(builder, 1, length, causal), True
        if not drafts and length <= decodes:
            yield _batch(builder, 1, length, causal), False
    if drafts:
        return
    # With a schedule the kernel also depends on the number of requests, at the shortest and longest decode.
    for requests in range(2, config.scheduler_config.max_num_seqs + 1):
        batches = [_batch(builder, requests, length, causal) for length in {1, decodes}]
        if not builder.build(0, batches[0]).schedules:
            return
        yield from ((batch, False) for batch in batches)


def _batch(builder: Any, requests: int, length: int, causal: bool) -> Any:
    """Return requests of equal length without context, in the null block."""
    # No request writes to the null block.
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
