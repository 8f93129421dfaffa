# SPDX-License-Identifier: Apache-2.0
"""How vLLM 0.20 to 0.33 shape what FLASH_ATTN gets: its KV cache, its windows, and the ranges of images.

Shared by the backends of the plugin that keep vLLM's metadata and cache and bring a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm.envs as envs
from packaging.version import Version
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.version import __version__


def split(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as (blocks, tokens a block, KV heads, head size), of the cache as this vLLM shapes it."""
    if kv_cache.dim() == 4:
        # From 0.26.0 on: (blocks, KV heads, tokens a block, keys and values of a head).
        keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    else:
        keys, values = kv_cache.unbind(_PAIR_DIM)
    return keys, values


def _pair_dim() -> int:
    """Which dimension of a cache with five holds keys and values: 0 up to 0.22, 1 up to 0.25."""
    if not hasattr(FlashAttentionBackend, "get_kv_cache_shape"):
        return 0
    blocks, block_size, kv_heads, head_size = 7, 16, 3, 8
    shape = FlashAttentionBackend.get_kv_cache_shape(blocks, block_size, kv_heads, head_size)
    return int(shape.index(2)) if len(shape) == 5 else 0


_PAIR_DIM = _pair_dim()


def symmetric(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """The window to both sides where attention is. vLLM's FlashAttention does so from 0.25.0 on; before, it looks back
    only, and tokens that should see each other do not.
    """
    return window if causal else (window[0], window[0])


def has_images(ranges: Mapping[int, list[Any]] | None) -> bool:
    """Whether a batch holds tokens of images that see each other in both directions.

    Args:
        ranges: by request, as vLLM gives them in a layer's metadata (``mm_prefix_range``, up to 0.23) or in what that
            is built from (``mm_req_doc_ranges``, later).
    """
    return bool(ranges) and any(ranges.values())  # type: ignore[union-attr]


def captures_short_queries(vllm_config: Any) -> bool:
    """Whether vLLM captures FULL graphs of mixed batches with a shorter longest query than it replays them with.

    Up to 0.30 the second model runner does: it spreads the tokens of such a graph evenly over the requests, and says
    that none is longer. A kernel that launches by this bound leaves out the tokens behind it. At a bound of one token
    FlashAttention 3 masks nothing, with heads of up to 64 and of more than 128.
    """
    if Version(__version__) >= Version("0.31.0"):
        return False
    # 0.20 and 0.21 have the variable alone.
    return bool(getattr(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER))
