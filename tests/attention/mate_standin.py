# SPDX-License-Identifier: Apache-2.0
"""A stand-in for mate, Moore Threads' library of kernels. Nothing here was recorded on MUSA hardware.

Its function has the names, the order and the conditions that were read in the source of mate 0.2.2: sinks are bfloat16
whatever the queries are, a page table is int32 and its rows lie side by side, and ``max_seqlen_q`` goes with
``cu_seqlens_q``. Arguments that the backend does not use are left out. "inputs must be float16 or bfloat16" is from the
commit messages of vllm-musa's pull request 52 (MUSA-0401 to MUSA-0405).

Attention is computed page by page in float64, so it depends on nothing that the backend computes itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

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


def mate(calls: list[dict[str, Any]] | None = None) -> ModuleType:
    """The module; ``calls`` notes what the function is called with."""
    module = ModuleType("mate")

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        learnable_sink: torch.Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 0,
        deterministic: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if calls is not None:
            calls.append(
                {"causal": causal, "deterministic": deterministic, "num_splits": num_splits, "sinks": learnable_sink}
            )
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is None
        assert seqused_k is not None
        assert page_table is not None
        assert page_table.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert softmax_scale is not None
        assert window_size is not None
        assert max_seqlen_k is not None
        assert max_seqlen_k >= int(seqused_k.max())
        assert max_seqlen_q is not None
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        if learnable_sink is not None:
            assert learnable_sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16"
            assert learnable_sink.shape == (q.shape[1],)
        assert out is not None
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        result = attention(
            q,
            k,
            v,
            cu_seqlens_q,
            seqused_k,
            page_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sinks=learnable_sink,
        )
        return out.copy_(result)

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module
