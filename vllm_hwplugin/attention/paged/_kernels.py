# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels: attention over a paged KV cache, split over its length, and the merge of the splits.

The online softmax and the split over the keys are FlashAttention 2's and Flash-Decoding's; the code is for large heads,
where one tile of the output fills half of a multiprocessor's registers. All logits are in units of log2(e), because the
hardware has ``exp2``.

A block of queries is ``BLOCK_Q`` tokens of one request with the ``GROUP`` query heads that share a KV head, so that
keys and values are read once for all of them. A program finds its tokens on the device from ``query_start_loc``: a
launch depends only on bounds and can be captured in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _request_of(query_start_loc, block, num_requests, BLOCK_Q: tl.constexpr):
    """Return the request of a block of queries, by binary search.

    Request ``r`` gets the blocks from ``query_start_loc[r] // BLOCK_Q + r`` on: at least as many as it needs, and known
    without a sum over the requests before it.
    """
    low = 0
    high = num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _block_of(query_start_loc, seq_lens, num_requests, blocks_per_request, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr):
    """Return request, first token in the batch, tokens left, first position.

    Tokens left is not positive if the program has nothing to do.
    """
    # The last blocks of a causal prefill see the most keys and take longest, so they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if SEARCH:
        request = _request_of(query_start_loc, block, num_requests, BLOCK_Q)
        skipped = (block - (tl.load(query_start_loc + request) // BLOCK_Q + request)) * BLOCK_Q
    else:
        request = block // blocks_per_request
        skipped = (block % blocks_per_request) * BLOCK_Q
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    context = tl.load(seq_lens + request) - count
    return block, request, start + skipped, count - skipped, context + skipped


@triton.jit
def _keys_of(
    position,
    tokens,
    length,
    split,
    num_splits,
    window_left,
    window_right,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return a split's first key, end, and the number of used splits.

    The first key is a multiple of ``BLOCK_N`` in every batch, so a row's tiles and rounding do not depend on other
    rows.
    """
    end = length
    begin = 0
    last = position + tl.minimum(tokens, BLOCK_Q) - 1
    if CAUSAL:
        end = tl.minimum(end, last + 1)
    if WINDOW:
        if window_left >= 0:
            begin = tl.maximum(position - window_left, 0) // BLOCK_N * BLOCK_N
        if window_right >= 0:
            end = tl.minimum(end, last + window_right + 1)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    used = tl.cdiv(tiles, tiles_per_split)
    begin += split * tiles_per_split * BLOCK_N
    return begin, tl.minimum(end, begin + tiles_per_split * BLOCK_N), used


# Specializing on these would compile again while serving, when a batch of another size comes.
@triton.jit(
    do_not_specialize=[
        "num_requests",
        "blocks_per_request",
        "num_splits",
        "scale",
        "softcap",
        "window_left",
        "window_right",
        "stride_query_token",
        "stride_query_head",
        "stride_out_token",
        "stride_out_head",
        "stride_table",
        "stride_key_block",
        "stride_key_token",
        "stride_key_head",
        "stride_value_block",
        "stride_value_token",
        "stride_value_head",
    ]
)
def attention(
    query,
    keys,
    values,
    out,
    partial_out,
    partial_lse,
    sinks,
    query_start_loc,
    seq_lens,
    block_table,
    num_requests,
    blocks_per_request,
    num_splits,
    scale,
    softcap,
    window_left,
    window_right,
    stride_query_token,
    stride_query_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    stride_key_block,
    stride_key_token,
    stride_key_head,
    stride_value_block,
    stride_value_token,
    stride_value_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Write ``out``, or results of splits; grid (query blocks, KV heads, splits).

    Strides except the last are multiples of 8 elements, for loads of 16 bytes.
    """
    stride_query_token = tl.multiple_of(stride_query_token, 8)
    stride_query_head = tl.multiple_of(stride_query_head, 8)
    stride_out_token = tl.multiple_of(stride_out_token, 8)
    stride_out_head = tl.multiple_of(stride_out_head, 8)
    stride_key_block = tl.multiple_of(stride_key_block, 8)
    stride_key_token = tl.multiple_of(stride_key_token, 8)
    stride_key_head = tl.multiple_of(stride_key_head, 8)
    stride_value_block = tl.multiple_of(stride_value_block, 8)
    stride_value_token = tl.multiple_of(stride_value_token, 8)
    stride_value_head = tl.multiple_of(stride_value_head, 8)
    block, request, token, tokens, position = _block_of(
        query_start_loc, seq_lens, num_requests, blocks_per_request, BLOCK_Q, SEARCH
    )
    if tokens <= 0:
        return
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    begin, end, used = _keys_of(
        position,
        tokens,
        length,
        split,
        num_splits,
        window_left,
        window_right,
        BLOCK_Q,
        BLOCK_N,
        MIN_TILES,
        CAUSAL,
        WINDOW,
    )
    if SPLIT and split >= tl.maximum(used, 1):
        return

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_PAD)
    row_token = rows // GROUP
    row_head = kv_head * GROUP + rows % GROUP
    row_real = (row_token < tokens) & (row_token < BLOCK_Q)
    row_position = position + row_token
    column_real = columns < HEAD_SIZE

    where = (token + row_token).to(tl.int64) * stride_query_token + row_head * stride_query_head
    q = tl.load(query + where[:, None] + columns[None, :], mask=row_real[:, None] & column_real[None, :], other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and split == 0:
        # A key without a value, counted in the first split.
        largest = tl.load(sinks + row_head, mask=row_real, other=0.0) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

    table = block_table + request.to(tl.int64) * stride_table
    keys += kv_head * stride_key_head
    values += kv_head * stride_value_head
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
        at_key = page * stride_key_block + n % PAGE * stride_key_token
        if HEAD_SIZE == HEAD_PAD:
            k = tl.load(keys + at_key[None, :] + columns[:, None])
        else:
            k = tl.load(keys + at_key[None, :] + columns[:, None], mask=column_real[:, None], other=0.0)
        logits = tl.dot(q, k) * scale
        if SOFTCAP:
            # tanh by a sigmoid: both scale and cap include the factor log2(e).
            logits = softcap * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 * (logits / softcap))) - 1.0)
        seen = inside[None, :] & row_real[:, None]
        if CAUSAL:
            seen = seen & (n[None, :] <= row_position[:, None])
        if WINDOW:
            if window_left >= 0:
                seen = seen & (row_position[:, None] - n[None, :] <= window_left)
            if window_right >= 0:
                seen = seen & (n[None, :] - row_position[:, None] <= window_right)
        logits = tl.where(seen, logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        # For a row that has seen no key yet any finite number works, because its weights are zero.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(logits - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        at_value = page * stride_value_block + n % PAGE * stride_value_token
        # The cache behind a request's last token may hold NaN, and NaN times a weight of zero is NaN.
        v = tl.load(
            values + at_value[:, None] + columns[None, :], mask=inside[:, None] & column_real[None, :], other=0.0
        )
        sums = tl.dot(weights.to(v.dtype), v, sums)
        largest = new_largest

    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    # A single split writes the result itself, and `merge` skips the row.
    if SPLIT and used > 1:
        slot = (block.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + split
        row = slot * BLOCK_M + rows
        tl.store(
            partial_out + row[:, None] * HEAD_SIZE + columns[None, :],
            result,
            mask=row_real[:, None] & column_real[None, :],
        )
        tl.store(partial_lse + row, largest + tl.log2(total), mask=row_real)
    else:
        where = (token + row_token).to(tl.int64) * stride_out_token + row_head * stride_out_head
        tl.store(
            out + where[:, None] + columns[None, :],
            result.to(out.dtype.element_ty),
            mask=row_real[:, None] & column_real[None, :],
        )


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "blocks_per_request",
        "num_splits",
        "window_left",
        "window_right",
        "stride_out_token",
        "stride_out_head",
    ]
)
def merge(
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    num_requests,
    blocks_per_request,
    num_splits,
    window_left,
    window_right,
    stride_out_token,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Write a slice of a row.

    Grid: (blocks of queries, KV heads * BLOCK_M, slices of the head).
    """
    block, request, token, tokens, position = _block_of(
        query_start_loc, seq_lens, num_requests, blocks_per_request, BLOCK_Q, SEARCH
    )
    kv_head = tl.program_id(1) // BLOCK_M
    row = tl.program_id(1) % BLOCK_M
    row_token = row // GROUP
    if (row_token >= tokens) | (row_token >= BLOCK_Q):
        return
    length = tl.load(seq_lens + request)
    _, _, used = _keys_of(
        position, tokens, length, 0, num_splits, window_left, window_right, BLOCK_Q, BLOCK_N, MIN_TILES, CAUSAL, WINDOW
    )
    if used <= 1:
        return
    slot = (block.to(tl.int64) * KV_HEADS + kv_head) * num_splits
    columns = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    column_real = columns < HEAD_SIZE

    splits = tl.arange(0, MAX_SPLITS)
    lse = tl.load(partial_lse + (slot + splits) * BLOCK_M + row, mask=splits < used, other=float("-inf"))
    largest = tl.max(lse, 0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - reference), 0)

    sums = tl.zeros([SLICE], tl.float32)
    for first in range(0, used, CHUNK):
        part = first + tl.arange(0, CHUNK)
        at = (slot + part) * BLOCK_M + row
        weight = tl.exp2(tl.load(partial_lse + at, mask=part < used, other=float("-inf")) - reference)
        result = tl.load(
            partial_out + at[:, None] * HEAD_SIZE + columns[None, :],
            mask=(part < used)[:, None] & column_real[None, :],
            other=0.0,
        )
        sums += tl.sum(weight[:, None] * result, 0)
    sums /= tl.where(total == 0.0, 1.0, total)
    where = (token + row_token).to(tl.int64) * stride_out_token + (kv_head * GROUP + row % GROUP) * stride_out_head
    tl.store(out + where + columns, sums.to(out.dtype.element_ty), mask=column_real)
