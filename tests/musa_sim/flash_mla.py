# SPDX-License-Identifier: Apache-2.0
"""vLLM's FLASH_ATTN_MLA on the simulated device, over a stand-in for FlashAttention 3.

A kernel of a CUDA graph keeps its longest query and its limit of splits. The stand-in refuses a schedule that was laid
out for others, or for other lengths, and a longer query.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

#: In place of 512, so that a request of more new tokens takes little time here.
LONGEST = 40

_ATTEND = (
    "attend(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor table, Tensor plan, "
    "float scale, int longest, int splits) -> ()"
)


def _attend(
    out: Any, q: Any, k: Any, v: Any, starts: Any, lengths: Any, table: Any, plan: Any, scale: float, *launch: int
) -> None:
    from mate._kernels import attention

    expected, found = [*launch, *lengths.tolist()], plan[: 2 + len(lengths)].tolist()
    if found != expected:
        raise RuntimeError(f"the schedule is for {found}, and the kernel was launched for {expected}")
    every_key = (True, -1, -1, 0.0, False)
    attention(out, q, k, v, starts, lengths, table, None, scale, *every_key, launch[0], None, None, None)


def get_scheduler_metadata(
    *, batch_size: int, max_seqlen_q: int, cache_seqlens: torch.Tensor, num_splits: int, **_: Any
) -> torch.Tensor:
    plan = torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32, device=cache_seqlens.device)
    plan[:1].fill_(max_seqlen_q)
    plan[1:2].fill_(num_splits)
    plan[2 : 2 + batch_size].copy_(cache_seqlens)
    return plan


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    scheduler_metadata: torch.Tensor,
    num_splits: int,
    **_: Any,
) -> torch.Tensor:
    query, keys = torch.cat((q_v, q), -1), torch.cat((v, k), -1)
    # A graph's own rows without a request have whatever was there.
    out = torch.empty_like(q_v)
    torch.ops.flash_3_standin.attend(
        out, query, keys, v, cu_seqlens_q, seqused_k, block_table, scheduler_metadata, softmax_scale, max_seqlen_q,
        num_splits,
    )  # fmt: skip
    return out


def use(what: str) -> None:
    """Have layers of MLA run on it; `what` may name that its builder measures the longest query in every batch."""
    from vllm_hwplugin.musa import _selector

    library = torch.library.Library("flash_3_standin", "DEF")
    library.define(_ATTEND)
    library.impl("attend", _attend, "CPU")
    torch.ops.flash_3_standin.library = library
    utils: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    utils.flash_attn_varlen_func, utils.get_scheduler_metadata = flash_attn_varlen_func, get_scheduler_metadata
    utils.flash_attn_supports_mla, utils.get_flash_attn_version = lambda: True, lambda: 3
    path = "vllm.v1.attention.backends.mla.flashattn_mla"
    module: Any = importlib.import_module(path)
    module.FlashAttnMLABackend.supports_compute_capability = classmethod(lambda cls, capability: True)
    module.FlashAttnMLAMetadataBuilder.reorder_batch_threshold = LONGEST
    _selector._OWN["FLASHMLA"] = f"{path}:FlashAttnMLABackend"
    if "measures" in what:
        from vllm_hwplugin.spec_decode.v2 import mixed_bounds

        mixed_bounds.is_mixed_graph = lambda *_: False
