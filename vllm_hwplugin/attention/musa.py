# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on Moore Threads GPUs, over ``mate.flash_attn_varlen_func``. Not run on MUSA hardware.

Metadata and the shape of the KV cache are those of vLLM's FlashAttention, version by version; its kernels are not: mate
computes the attention, and the Triton kernel of vLLM's TRITON_ATTN writes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mate  # type: ignore[import-not-found]  # MUSA hosts only
import torch
import vllm.envs as envs
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.version import __version__

from ._classes import declares
from ._flash import has_images, split, symmetric
from ._mate_call import bind
from .capabilities import FLASH_ATTN_MUSA

_attention = bind(mate.flash_attn_varlen_func)


class MusaFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's, without what only its own kernels have: their schedules, and cascade attention."""

    # `build` only refuses; a drafter's graphs (`spec_decode.draft_builders`) may hold what vLLM's makes.
    same_metadata_as_base: ClassVar[bool] = True

    # As for FlashAttention 2: a graph holds batches whose requests have equally many tokens.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # Here from 0.24.0 on, in every step; before, vLLM writes them into the metadata after this.
        _refuse_images(getattr(common_attn_metadata, "mm_req_doc_ranges", None))
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class MusaFlashAttentionImpl(AttentionImpl):  # type: ignore[misc]  # as below
    """Attention of decoder layers.

    Raises:
        ValueError: the layer needs what the backend does not declare.
    """

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
        backend = MusaFlashAttentionBackend
        if alibi_slopes is not None:
            raise ValueError("FLASH_ATTN on MUSA has no ALiBi; use TRITON_ATTN")
        for found, fit, what in (
            (head_size, backend.supports_head_size, "head size"),
            (kv_cache_dtype, backend.supports_kv_cache_dtype, "KV cache type"),
            (attn_type, backend.supports_attn_type, "attention type"),
        ):
            if not fit(found):
                raise ValueError(f"FLASH_ATTN on MUSA does not support {what} {found}; use TRITON_ATTN")
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}, expected one for each head: ({num_heads},)")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._loaded_sinks = sinks
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Make of the layer's sinks what mate takes: bfloat16, whatever the type of the queries is.

        Here and not in ``forward``, which would cast in every step and in every graph. vLLM calls it again when it has
        loaded other weights; graphs keep the address of the first copy, so that is written to.
        """
        super().process_weights_after_loading(act_dtype)
        loaded = self._loaded_sinks
        if loaded is None or self.sinks is None:
            return
        if self.sinks is loaded:
            self.sinks = loaded.detach().to(torch.bfloat16)
        else:
            self.sinks.copy_(loaded)

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
        """Attention of ``query`` (tokens, heads, head size) over the cache, into ``output``.

        Raises:
            NotImplementedError: asked for what the backend does not declare.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FLASH_ATTN on MUSA does not quantize its output")
        if attn_metadata is None:
            # vLLM measures memory, with no cache yet.
            return output.fill_(0)
        causal = attn_metadata.causal
        if not isinstance(causal, bool):
            raise NotImplementedError("FLASH_ATTN on MUSA has one mask for all requests: causal, or not")
        _refuse_images(getattr(attn_metadata, "mm_prefix_range", None))
        tokens = attn_metadata.num_actual_tokens
        keys, values = split(kv_cache, self.head_size)
        _attention(
            output[:tokens],
            q=query[:tokens],
            k=keys,
            v=values,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
            softmax_scale=self.scale,
            causal=causal,
            window_size=symmetric(self.sliding_window, causal),
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            deterministic=self.batch_invariant,
            # 0: as mate decides. Today it splits only by a schedule, which it is not given.
            num_splits=1 if self.batch_invariant else 0,
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
        """Write the tokens that have a slot (``slot_mapping``, -1: none) into the cache."""
        keys, values = split(kv_cache, self.head_size)
        # "auto": stored as it is. A cache of another type than the model's is refused when the backend is selected.
        triton_reshape_and_cache_flash(key, value, keys, values, slot_mapping, "auto", layer._k_scale, layer._v_scale)


@declares(FLASH_ATTN_MUSA, __version__)
class MusaFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FlashAttention by name and KV cache; what it can do is declared for mate."""

    @staticmethod
    def get_impl_cls() -> type[MusaFlashAttentionImpl]:
        return MusaFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MusaFlashAttentionMetadataBuilder]:
        return MusaFlashAttentionMetadataBuilder

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """A cache of another type than the queries'. vLLM's own answer compares with CUDA architectures."""
        if kv_cache_dtype in (None, "auto") or str(dtype) == f"torch.{kv_cache_dtype}":
            return None
        return f"FLASH_ATTN on MUSA needs keys of the queries' type {dtype}, and the KV cache is {kv_cache_dtype}"


def _refuse_images(ranges: Mapping[int, list[Any]] | None) -> None:
    if has_images(ranges):
        raise NotImplementedError(
            "FLASH_ATTN on MUSA serves this model with text only: the tokens of an image see each other in both "
            "directions, for which mate has no mask. Start with --language-model-only so that images are refused at "
            "the request, or use TRITON_ATTN"
        )
