# SPDX-License-Identifier: Apache-2.0
"""What the stand-in computes, as torch operations: on a device without kernels of its own they run by its fallback, so
that a graph records one call and no value of a tensor reaches the host outside of them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

#: Numbers at the end of a schedule that say what it was made for; the real ones have none.
MADE_FOR = 9
_SCHEMAS = {
    # out: (tokens, heads, size); k and v: (pages, page, heads, size).
    "attention": (
        "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor seqused_k, Tensor page_table, "
        "Tensor? sink, Tensor? metadata, float scale, bool causal, int left, int right, float softcap, int num_splits, "
        "int tile_m, int tile_n, bool packed, bool local, int units, int longest, int room) -> ()"
    ),
    # lse: (heads, tokens); k and v: (keys, heads, size).
    "packed": (
        "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "float scale, bool causal, int longest_q, int longest_k, bool built) -> ()"
    ),
    # out: (requests, tokens, heads, 512); lse: (requests, tokens, heads); cache: (pages, 64, 1, 576).
    "latent": (
        "(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor cache, Tensor block_table, Tensor lengths, Tensor parts, "
        "Tensor num_splits, float scale, bool causal) -> ()"
    ),
    "latent_plan": "(Tensor(a!) parts, Tensor(b!) num_splits, Tensor lengths) -> ()",
    "schedule": (
        "(Tensor(a!) metadata, Tensor cu_seqlens_q, Tensor seqused_k, bool causal, bool local, int left, int right, "
        "int num_splits, int tile_m, int tile_n, int rows, int heads, int units, int room) -> ()"
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
    room: int,
) -> None:
    if len(cu_seqlens_q) > 1 and int(cu_seqlens_q.diff().max()) > longest:
        raise RuntimeError(f"max_seqlen_q is {longest}, and a request has {int(cu_seqlens_q.diff().max())} queries")
    heads, kv_heads = q.shape[1], k.shape[-2]
    groups = heads // kv_heads
    parts = [1] * (len(cu_seqlens_q) - 1)
    if metadata is not None:
        parts = _parts(metadata, cu_seqlens_q, seqused_k, causal, local, left, right, num_splits, tile_m,
                       tile_n, groups if packed else 1, kv_heads if packed else heads, units, room)  # fmt: skip
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


def packed(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    longest_q: int,
    longest_k: int,
    built: bool,
) -> None:
    for name, starts, longest, rows in (("q", cu_seqlens_q, longest_q, q), ("k", cu_seqlens_k, longest_k, k)):
        found = int(starts.diff().max())
        if found > longest or int(starts[-1]) > len(rows):
            raise RuntimeError(f"max_seqlen_{name} is {longest}, and a request has {found} of {len(rows)}")
    groups = q.shape[1] // k.shape[1]
    for request in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*starts[request : request + 2].tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
        if rows.start == rows.stop:
            continue
        if keys.start == keys.stop:
            if built:
                raise RuntimeError(f"request {request} has no keys, and what the built kernel does then is not known")
            out[rows], lse[:, rows] = 0, float("-inf")
            continue
        found_out, found_lse = _rows(
            q[rows].double(),
            *(one[keys].double().repeat_interleave(groups, 1) for one in (k, v)),
            scale,
            causal,
        )
        out[rows], lse[:, rows] = found_out, found_lse


def _rows(q: Any, keys: Any, values: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """Attention, and the log-sum-exp of each head and row; the last query goes with the last key."""
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if causal:
        behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None, :]
        scores = scores.masked_fill(behind < 0, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def latent(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    parts: torch.Tensor,
    num_splits: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    right = torch.empty_like(parts), torch.empty_like(num_splits)
    latent_plan(*right, lengths)
    if not torch.equal(parts[:, :5], right[0][:, :5]) or not torch.equal(num_splits, right[1]):
        raise RuntimeError(f"the plan is not that of the batch: found {parts[:, :5].tolist()}, {num_splits.tolist()}")
    for request, length in enumerate(lengths.tolist()):
        if length == 0:
            # Nobody may use it.
            out[request], lse[request] = float("nan"), float("nan")
            continue
        pages = block_table[request, : -(-length // cache.shape[1])].long()
        if len(pages) * cache.shape[1] < length or int(pages.max()) >= len(cache):
            raise RuntimeError(f"request {request} has {length} keys, and the block table does not hold them")
        keys = cache[pages].flatten(0, 1)[:length].double().expand(-1, q.shape[2], -1)
        found, sums = _rows(q[request].double(), keys, keys[..., : out.shape[-1]], scale, causal)
        out[request], lse[request] = found, sums.transpose(0, 1)


def latent_plan(parts: torch.Tensor, num_splits: torch.Tensor, lengths: torch.Tensor) -> None:
    """Give each part about as many pages, where a request costs five pages more than it has.

    Of each part: its first request and page there, its last request and the page behind its last one, and how many
    parts of its first request come before it. Behind these five is what was there.
    """
    pages = [max(-(-length // 64), 1) for length in lengths.tolist()]
    room = -(-sum(count + 5 for count in pages) // len(parts)) + 5
    request = done = before = 0
    ends = [0]
    for part in parts:
        first, left = (request, done, before), room
        while request < len(pages):
            rest = pages[request] - done
            if left < rest + 5:
                taken = max(left - 5, 0)
                done, before = done + taken, before + (taken > 0)
                break
            ends.append(ends[-1] + before + 1)
            request, done, before, left = request + 1, 0, 0, left - rest - 5
        last = (request, done) if done else (request - 1, pages[request - 1] if lengths[request - 1] else 0)
        part[:5] = torch.tensor([*first[:2], *last, first[2]], dtype=torch.int32)
    num_splits.copy_(torch.tensor(ends, dtype=torch.int32))


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
    room: int,
) -> None:
    """Four int32 for each request, one kind after the other: parts, request, tiles of rows, heads at a time.

    Requests are in the order of their work, most first. Parts are as many as fill the device, `num_splits` at most, and
    `units` over the batch. Behind them is what the schedule was made for, so that an attention of anything else is an
    error: `room` is the keys that a page table holds.
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
    made_for = [causal, local, *((left, right) if local else (-1, -1)), num_splits, tile_m, rows, heads, room]
    metadata.copy_(torch.tensor([*itertools.chain(*columns), *made_for], dtype=torch.int32))


def _parts(
    metadata: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    causal: bool,
    local: bool,
    left: int,
    right: int,
    *rest: Any,
) -> list[int]:
    """How many parts each request has by a schedule, which must be the batch's: for the mask, or without its window."""
    batch = len(cu_seqlens_q) - 1
    found = metadata[: 4 * batch + MADE_FOR]
    for mask in ((causal, local), *([(right == 0, False)] if local else [])):
        expected = torch.empty_like(found)
        schedule(expected, cu_seqlens_q, seqused_k, *mask, left, right, *rest)
        if torch.equal(found, expected):
            parts = dict(zip(found[batch : 2 * batch].tolist(), found[:batch].tolist(), strict=True))
            return [parts[request] for request in range(batch)]
    raise RuntimeError(f"the schedule is not that of the batch: found {found.tolist()}, expected {expected.tolist()}")


# Several tests may load the package, each as a module of its own; an operation can be defined once in a process.
if not hasattr(torch.ops.mate_standin, "attention"):
    _library = torch.library.Library("mate_standin", "DEF")
    for _name, _function in (
        ("attention", attention), ("schedule", schedule), ("packed", packed), ("latent", latent),
        ("latent_plan", latent_plan),
    ):  # fmt: skip
        _library.define(_name + _SCHEMAS[_name])
        _library.impl(_name, _function, "CPU")
    torch.ops.mate_standin.library = _library

attend = torch.ops.mate_standin.attention
plan = torch.ops.mate_standin.schedule
attend_packed = torch.ops.mate_standin.packed
attend_latent = torch.ops.mate_standin.latent
plan_latent = torch.ops.mate_standin.latent_plan
