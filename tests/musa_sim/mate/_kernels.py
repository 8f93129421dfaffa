# SPDX-License-Identifier: Apache-2.0
"""What the stand-in computes, as torch operations: on a device without kernels of its own they run by its fallback, so
that a graph records one call and no value of a tensor reaches the host outside of them.
"""

from __future__ import annotations

from typing import Any

import torch

_SCHEMAS = {
    # out: (tokens, heads, size); k and v: (pages, page, heads, size).
    "attention": (
        "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor seqused_k, Tensor page_table, "
        "Tensor? sink, Tensor? metadata, float scale, bool causal, int left, int right, float softcap, int num_splits, "
        "int tile_m, int tile_n, bool packed, bool local, int units, int longest) -> ()"
    ),
    "schedule": (
        "(Tensor(a!) metadata, Tensor cu_seqlens_q, Tensor seqused_k, bool causal, bool local, int left, int right, "
        "int num_splits, int tile_m, int tile_n, int rows, int heads, int units) -> ()"
    ),
}


def attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    sink: torch.Tensor | None,
    metadata: torch.Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    num_splits: int,
    tile_m: int,
    tile_n: int,
    packed: bool,
    local: bool,
    units: int,
    longest: int,
) -> None:
    if len(cu_seqlens_q) > 1 and int(cu_seqlens_q.diff().max()) > longest:
        raise RuntimeError(f"max_seqlen_q is {longest}, and a request has {int(cu_seqlens_q.diff().max())} queries")
    heads, kv_heads = q.shape[1], k.shape[-2]
    groups = heads // kv_heads
    parts = [1] * (len(cu_seqlens_q) - 1)
    if metadata is not None:
        parts = _parts(metadata, cu_seqlens_q, seqused_k, causal, local, left, right, num_splits, tile_m,
                       tile_n, groups if packed else 1, kv_heads if packed else heads, units)  # fmt: skip
    for request, (length, splits) in enumerate(zip(seqused_k.tolist(), parts, strict=True)):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        if start == end:
            continue
        page = k.shape[1]
        pages = page_table[request, : -(-length // page)].long()
        if len(pages) * page < length or (len(pages) and int(pages.max()) >= len(k)):
            raise RuntimeError(f"request {request} has {length} keys, and the page table does not hold them")
        keys, values = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        keys = keys.repeat_interleave(groups, 1).double()
        values = values.repeat_interleave(groups, 1).double()
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # How far a key lies behind its query; the last query goes with the last key.
        behind = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)[None, :]
        hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
        if local:
            hidden = hidden | (behind > left) | (-behind > right)
        scores = scores.masked_fill(hidden, float("-inf"))
        out[start:end] = _combined(scores, values, sink, splits, tile_n)


def _combined(scores: Any, values: Any, sink: torch.Tensor | None, splits: int, tile_n: int) -> Any:
    """Attention in `splits` parts of whole tiles of keys, each with a sum of its own; then the parts together."""
    tiles = -(-scores.shape[-1] // tile_n)
    step = -(-tiles // splits) * tile_n or 1
    sums, weighted = [], []
    for first in range(0, max(scores.shape[-1], 1), step):
        part = scores[..., first : first + step]
        total = part.logsumexp(-1)
        weights = (part - total.masked_fill(total.isinf(), 0)[..., None]).exp()
        sums.append(total)
        weighted.append(torch.einsum("hqk,khd->hqd", weights, values[first : first + step]))
    if sink is not None:
        sums.append(sink.double()[:, None].expand_as(sums[0]))
        weighted.append(torch.zeros_like(weighted[0]))
    together = torch.stack(sums)
    total = together.logsumexp(0)
    shares = (together - total.masked_fill(total.isinf(), 0)).exp()
    return (shares[..., None] * torch.stack(weighted)).sum(0).transpose(0, 1).to(torch.float32)


def schedule(
    metadata: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    causal: bool,
    local: bool,
    left: int,
    right: int,
    num_splits: int,
    tile_m: int,
    tile_n: int,
    rows: int,
    heads: int,
    units: int,
) -> None:
    """Four int32 for each request, one kind after the other: parts, request, tiles of rows, heads at a time.

    Requests are in the order of their work, most first. Parts are as many as fill the device, `num_splits` at most, and
    `units` over the batch.
    """
    tiles_m = [-(-int(length) * rows // tile_m) for length in cu_seqlens_q.diff()]
    reach = left + right + 1 + tile_m
    seen = [min(length, reach) if local else length for length in seqused_k.tolist()]
    tiles_n = [-(-length // tile_n) for length in seen]
    total = sum(m * n for m, n in zip(tiles_m, tiles_n, strict=True))
    each = -(-total * 11 * heads // (10 * units)) or 1
    parts = [max(min(-(-n // each), num_splits), 1) for n in tiles_n]
    while sum(parts) > units and max(parts) > 1:
        costs = [
            (-(-n // (p - 1)) - -(-n // p), i) for i, (n, p) in enumerate(zip(tiles_n, parts, strict=True)) if p > 1
        ]
        parts[min(costs)[1]] -= 1
    work = [
        -(-n // p) * tile_n - (m * tile_m if causal else 0) for n, p, m in zip(tiles_n, parts, tiles_m, strict=True)
    ]
    order = sorted(range(len(parts)), key=lambda request: -work[request])
    columns = [[parts[i] for i in order], order, [tiles_m[i] for i in order], [heads] * len(order)]
    metadata.copy_(torch.tensor(columns, dtype=torch.int32).flatten())


def _parts(
    metadata: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    causal: bool,
    local: bool,
    *rest: Any,
) -> list[int]:
    """How many parts each request has by a schedule, which must be the batch's: for the mask, or without its window."""
    batch = len(cu_seqlens_q) - 1
    found = metadata[: 4 * batch]
    for mask in ((causal, local), (True, False)):
        right = torch.empty(4 * batch, dtype=torch.int32)
        schedule(right, cu_seqlens_q, seqused_k, *mask, *rest)
        if torch.equal(found, right):
            parts = dict(zip(found[batch : 2 * batch].tolist(), found[:batch].tolist(), strict=True))
            return [parts[request] for request in range(batch)]
    raise RuntimeError(f"the schedule is not that of the batch: found {found.tolist()}, expected {right.tolist()}")


# Several tests may load the package, each as a module of its own; an operation can be defined once in a process.
if not hasattr(torch.ops.mate_standin, "attention"):
    _library = torch.library.Library("mate_standin", "DEF")
    for _name, _function in (("attention", attention), ("schedule", schedule)):
        _library.define(_name + _SCHEMAS[_name])
        _library.impl(_name, _function, "CPU")
    torch.ops.mate_standin.library = _library

attend = torch.ops.mate_standin.attention
plan = torch.ops.mate_standin.schedule
