# SPDX-License-Identifier: Apache-2.0
"""Forms of FLASH_ATTN's KV cache, windows and image ranges in vLLM 0.20 to 0.33.

Shared by the plugin's backends that keep vLLM's metadata and cache and have their own kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from packaging.version import Version
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.version import __version__


class Decoder:
    """A decoder layer of an implementation over vLLM's FLASH_ATTN cache; `title` names it in messages."""

    title: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError(f"{self.title} has no ALiBi; use TRITON_ATTN")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks: Any = sinks
        self.batch_invariant_enabled = bool(envs.VLLM_BATCH_INVARIANT)

    def refuse_call(self, metadata: Any, *output_scales: torch.Tensor | None) -> None:
        """Raise NotImplementedError for a quantized output or a mask for each request."""
        if any(scale is not None for scale in output_scales):
            raise NotImplementedError(f"{self.title} does not quantize its output")
        if not isinstance(metadata.causal, bool):
            raise NotImplementedError(
                f"{self.title} has one mask for all requests, causal or not, found one per request; use TRITON_ATTN"
            )


def split(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [blocks, block size, KV heads, head size]."""
    if kv_cache.dim() == 4:
        # From 0.26.0 on: [blocks, KV heads, block size, keys and values of a head].
        keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    else:
        keys, values = kv_cache.unbind(_PAIR_DIM)
    return keys, values


def _pair_dim() -> int:
    # Of a cache with five dimensions, the one of keys and values: 0 up to 0.22, 1 up to 0.25.
    if not hasattr(FlashAttentionBackend, "get_kv_cache_shape"):
        return 0
    blocks, block_size, kv_heads, head_size = 7, 16, 3, 8
    shape = FlashAttentionBackend.get_kv_cache_shape(blocks, block_size, kv_heads, head_size)
    return int(shape.index(2)) if len(shape) == 5 else 0


_PAIR_DIM = _pair_dim()


def symmetric(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Return the window, on both sides of bidirectional attention.

    vLLM's FlashAttention does so from 0.25.0 on; before, it only looks back, and some tokens do not see each other.
    """
    return window if causal else (window[0], window[0])


def has_images(ranges: Mapping[int, list[Any]] | None) -> bool:
    """Whether a batch has image tokens that see each other both ways.

    The ranges by request are in a layer's metadata (``mm_prefix_range``) up to 0.23, and later in the metadata's input
    (``mm_req_doc_ranges``).
    """
    return bool(ranges) and any(ranges.values())  # type: ignore[union-attr]


def captures_short_queries(vllm_config: Any) -> bool:
    """Whether FULL graphs are captured with shorter queries than replays have.

    The second model runner does so up to 0.30: it spreads the tokens of a mixed batch's graph evenly over the requests,
    and passes their length as the longest query. A kernel that launches by this bound omits the tokens beyond it. For
    one token, FlashAttention 3 also masks nothing, with heads of up to 64 and of more than 128.
    """
    if Version(__version__) >= Version("0.31.0"):
        return False
    # 0.20 and 0.21 only have the variable.
    return bool(getattr(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER))
