# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.fused_qk_norm_rope``: RMS norm and rotary embedding of all query and key heads, in place."""

from __future__ import annotations

from typing import Final

import torch

from .arguments import HALVES, Checks
from .compile.spec import KERNELS
from .define import operation

# Most heads, and most elements of a head: the kernel's indices have 32 bits.
_MAX: Final = 1 << 16


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
    heads = num_heads_q, num_heads_k, num_heads_v
    checks = Checks("fused_qk_norm_rope", "qkv", qkv)
    checks.tensor("qkv", qkv, *HALVES)
    checks.that(all(0 <= n <= _MAX for n in heads), f"the numbers of heads are {heads}; expected 0 to {_MAX}")
    checks.that(0 < head_dim <= _MAX, f"head_dim is {head_dim}; expected 1 to {_MAX}")
    width = sum(heads) * head_dim
    checks.that(
        qkv.dim() == 2 and qkv.shape[1] == width,
        f"qkv has shape {tuple(qkv.shape)}; expected [tokens, {width}], for heads of head_dim={head_dim}",
    )
    checks.tensor("position_ids", position_ids, torch.int64, shape=(qkv.shape[0],))
    checks.tensor("q_weight", q_weight, qkv.dtype, shape=(head_dim,))
    checks.tensor("k_weight", k_weight, qkv.dtype, shape=(head_dim,))
    checks.tensor("cos_sin_cache", cos_sin_cache, qkv.dtype, torch.float32)
    checks.that(cos_sin_cache.dim() == 2, f"cos_sin_cache has {cos_sin_cache.dim()} dimensions; expected 2")
    rotary_dim = cos_sin_cache.shape[1]
    checks.that(
        rotary_dim % 2 == 0 and rotary_dim <= head_dim,
        f"rotary_dim is {rotary_dim}; expected an even number of at most head_dim={head_dim}",
    )
    of_query_and_key = qkv.view(qkv.shape[0], sum(heads), head_dim)[:, : num_heads_q + num_heads_k]
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
