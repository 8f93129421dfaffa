# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on Moore Threads GPUs, over ``mate.flash_attn_varlen_func``. Not run on MUSA hardware.

Metadata and shape of the KV cache are the installed vLLM's for FlashAttention. mate computes the attention, and
the Triton kernel of vLLM's TRITON_ATTN writes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.version import __version__

from ..attention.backends import MUSA, MUSA_PAGE
from ..attention.classes import declares
from ..attention.flash import Decoder, has_images, split, symmetric
from ._mate import FP8, cache_trouble, checked

_attend = checked(
    "FLASH_ATTN",
    "flash_attn_varlen_func",
    (
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "page_table",
        "softmax_scale", "causal", "window_size", "softcap", "learnable_sink", "deterministic", "num_splits",
    ),
)  # fmt: skip


class MusaFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's builder without schedules, which change with mate's version, and without cascade attention."""

    # As for FlashAttention 2: all requests of a graph's batch have equally many tokens.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # From 0.24.0 on the ranges are here in every step; before, vLLM adds them to the metadata after this call.
        _refuse_images(getattr(common_attn_metadata, "mm_req_doc_ranges", None))
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class MusaFlashAttentionImpl(Decoder, AttentionImpl):  # type: ignore[misc]  # as below
    """Attention of decoder layers that the backend's declarations allow; raises ValueError with ALiBi."""

    title = "FLASH_ATTN on MUSA"

    def __init__(self, *layer: Any, **settings: Any) -> None:
        super().__init__(*layer, **settings)
        # Then vLLM quantizes the queries.
        self.supports_quant_query_input = self.kv_cache_dtype in FP8
        self._loaded_sinks = self.sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the layer's sinks to bfloat16, the only type mate takes.

        vLLM calls this again after it has loaded other weights; graphs hold the address of the first copy.
        """
        super().process_weights_after_loading(act_dtype)
        loaded = self._loaded_sinks
        if self.sinks is not loaded:
            self.sinks.copy_(loaded)
        elif loaded is not None:
            self.sinks = loaded.detach().to(torch.bfloat16)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of ``query``, (tokens, heads, head size), into ``output``.

        Raises NotImplementedError if the backend does not support the batch.
        """
        if attn_metadata is None:
            # vLLM's memory profiling, which has no cache.
            return output.fill_(0)
        self.refuse_call(attn_metadata, output_scale, output_block_scale)
        causal = attn_metadata.causal
        _refuse_images(getattr(attn_metadata, "mm_prefix_range", None))
        tokens = attn_metadata.num_actual_tokens
        keys, values = split(kv_cache, self.head_size)
        descales = {}
        if self.supports_quant_query_input:
            keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
            scales = {"q": layer._q_scale, "k": layer._k_scale, "v": layer._v_scale}
            requests = attn_metadata.seq_lens.shape[0]
            descales = {f"{name}_descale": scale.expand(requests, self.num_kv_heads) for name, scale in scales.items()}
        _attend(
            q=query[:tokens],
            k=keys,
            v=values,
            out=output[:tokens],
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            page_table=attn_metadata.block_table,
            softmax_scale=self.scale,
            causal=causal,
            window_size=symmetric(self.sliding_window, causal),
            softcap=self.logits_soft_cap,
            learnable_sink=self.sinks,
            deterministic=self.batch_invariant_enabled,
            num_splits=1 if self.batch_invariant_enabled else 0,
            **descales,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write tokens into the cache (``slot_mapping`` -1: no slot)."""
        keys, values = split(kv_cache, self.head_size)
        if self.supports_quant_query_input:
            write_fp8(keys, key, slot_mapping, layer._k_scale)
            write_fp8(values, value, slot_mapping, layer._v_scale)
            return
        # "auto": stored unconverted. The selector refuses a cache of another type than the model's.
        triton_reshape_and_cache_flash(key, value, keys, values, slot_mapping, "auto", layer._k_scale, layer._v_scale)


@declares(MUSA.declared, __version__)
class MusaFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FlashAttention by name and KV cache, with mate's capabilities."""

    @staticmethod
    def get_impl_cls() -> type[MusaFlashAttentionImpl]:
        return MusaFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MusaFlashAttentionMetadataBuilder]:
        return MusaFlashAttentionMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the block size if the user names none: whole pages."""
        return -(-default_block_size // MUSA_PAGE) * MUSA_PAGE

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        return cache_trouble("FLASH_ATTN", dtype, kv_cache_dtype)


def write_fp8(cache: torch.Tensor, new: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> None:
    """Write rows of `new` into slots (-1: none) of an FP8 cache.

    vllm-musa reports that Triton for MUSA has no such conversion. A row without a slot goes to vLLM's null block, which
    nobody reads.
    """
    # MUSA's conversion is reported not to saturate.
    most = torch.finfo(torch.float8_e4m3fn).max
    numbers = (new[: slots.shape[0]].float() / scale).clamp(-most, most).to(torch.float8_e4m3fn)
    slots = slots.clamp(min=0)
    size = cache.shape[1]
    cache.view(torch.uint8)[slots // size, slots % size] = numbers.view(torch.uint8)


def _refuse_images(ranges: Mapping[int, list[Any]] | None) -> None:
    if has_images(ranges):
        raise NotImplementedError(
            "FLASH_ATTN on MUSA runs this model only with text: attention within an image is bidirectional, and mate "
            "has no mask for it. Start with --language-model-only to refuse requests with images, or use TRITON_ATTN"
        )
