# SPDX-License-Identifier: Apache-2.0
"""Paged attention page by page in float64, so it depends on nothing that a kernel or a backend computes itself."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if {q.dtype, k.dtype, v.dtype} - {torch.float16, torch.bfloat16}:
        raise RuntimeError("inputs must be float16 or bfloat16")
    out = torch.empty_like(q)
    block_size, groups = k.shape[1], q.shape[1] // k.shape[2]
    for request, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        pages = block_table[request, : -(-length // block_size)].long()
        keys = k[pages].flatten(0, 1)[:length].repeat_interleave(groups, 1).double()
        values = v[pages].flatten(0, 1)[:length].repeat_interleave(groups, 1).double()
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # How far a key lies behind its query, whose last token is the last key.
        behind = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)[None, :]
        before, after = window_size
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        hidden |= (behind < 0) if causal else False
        hidden |= (behind > before) if before >= 0 else False
        hidden |= (-behind > after) if after >= 0 else False
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
