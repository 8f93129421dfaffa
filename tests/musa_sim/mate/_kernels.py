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
        "Tensor? sink, float scale, bool causal, int left, int right, float softcap, bool local, int longest, "
        "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale) -> ()"
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
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    local: bool,
    longest: int,
    *descales: torch.Tensor | None,
) -> None:
    if len(cu_seqlens_q) > 1 and int(cu_seqlens_q.diff().max()) > longest:
        raise RuntimeError(f"max_seqlen_q is {longest}, and a request has {int(cu_seqlens_q.diff().max())} queries")
    heads, kv_heads = q.shape[1], k.shape[-2]
    groups = heads // kv_heads
    for request, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        if start == end:
            continue
        page = k.shape[1]
        pages = page_table[request, : -(-length // page)].long()
        if len(pages) * page < length or (len(pages) and int(pages.max()) >= len(k)):
            raise RuntimeError(f"request {request} has {length} keys, and the page table does not hold them")
        keys, values = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        of_q, of_k, of_v = (
            1.0 if one is None else one[request].double().repeat_interleave(groups)[:, None] for one in descales
        )
        keys = keys.to(torch.float32).double().repeat_interleave(groups, 1) * of_k
        values = values.to(torch.float32).double().repeat_interleave(groups, 1) * of_v
        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(torch.float32).double() * of_q, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # How far a key lies behind its query; the last query goes with the last key.
        behind = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)[None, :]
        hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
        if local:
            hidden = hidden | (behind > left) | (-behind > right)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink is not None:
            # A key without a value.
            scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, end - start, 1)], -1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        # A query that sees no key has no result.
        weights = scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(torch.float32)


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
            q[rows].double(), *(one[keys].double().repeat_interleave(groups, 1) for one in (k, v)), scale, causal
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


# Several tests may load the package, each as a module of its own; an operation can be defined once in a process.
if not hasattr(torch.ops.mate_standin, "attention"):
    _library = torch.library.Library("mate_standin", "DEF")
    for _name, _function in (
        ("attention", attention), ("packed", packed), ("latent", latent), ("latent_plan", latent_plan),
    ):  # fmt: skip
        _library.define(_name + _SCHEMAS[_name])
        _library.impl(_name, _function, "CPU")
    torch.ops.mate_standin.library = _library

attend = torch.ops.mate_standin.attention
attend_packed = torch.ops.mate_standin.packed
attend_latent = torch.ops.mate_standin.latent
plan_latent = torch.ops.mate_standin.latent_plan
