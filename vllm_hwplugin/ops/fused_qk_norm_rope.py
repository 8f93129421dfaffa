# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.fused_qk_norm_rope``: RMS norm and rotary embedding of all query and key heads, in place."""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation


# vLLM's declaration, so that this operation can replace vLLM's.
@operation(kernel=KERNELS["fused_qk_norm_rope"], writes=("qkv",))
def fused_qk_norm_rope(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """Norm each query and key head, then rotate its first ``rotary_dim`` elements.

    The arithmetic is float32 and the result is rounded once. Values do not change.

    Args:
        qkv: [tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], contiguous; float16 or bfloat16.
        head_dim: elements of a head. 64, 128, 256 and 512 run the fast kernel if ``rotary_dim`` is a multiple of 16.
        eps: added to the mean square.
        q_weight, k_weight: [head_dim], of qkv's type.
        cos_sin_cache: [max_position, rotary_dim], contiguous, the cosines and then the sines; qkv's type or float32.
        is_neox: the pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1).
        position_ids: [tokens], int64; rows of the cache. The kernel cannot check their range.
        forced_token_heads_per_warp: for vLLM's kernel; without effect here.
    """
    heads = num_heads_q + num_heads_k + num_heads_v
    of_query_and_key = qkv.view(qkv.shape[0], heads, head_dim)[:, : num_heads_q + num_heads_k]
    weight = torch.cat([q_weight.expand(num_heads_q, head_dim), k_weight.expand(num_heads_k, head_dim)]).float()
    normed = of_query_and_key.float()
    normed = normed * torch.rsqrt(normed.square().mean(dim=-1, keepdim=True) + eps) * weight
    cos, sin = cos_sin_cache.index_select(0, position_ids).float().unsqueeze(1).chunk(2, dim=-1)
    part = normed[..., : cos_sin_cache.shape[1]]
    first, second = part.chunk(2, dim=-1) if is_neox else (part[..., ::2], part[..., 1::2])
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)
    of_query_and_key.copy_(normed)
