# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on Moore Threads GPUs, over ``mate.flash_attn_varlen_func``. Not run on MUSA hardware.

Metadata and shape of the KV cache are the installed vLLM's for FlashAttention. mate computes the attention, and
the Triton kernel of vLLM's TRITON_ATTN writes the cache.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import mate  # type: ignore[import-not-found]  # MUSA hosts only
import torch
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.version import __version__

from ..attention.backends import MUSA
from ..attention.classes import declares
from ..attention.flash import has_images, split, symmetric
from ._mate import checked, other_type
from ._mate_schedule import ARGUMENTS, Schedule, Schedules
from ._mate_warmup import dummy_batches

logger = logging.getLogger("vllm.hwplugin")

_attend = checked(
    "FLASH_ATTN",
    "flash_attn_varlen_func",
    (
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "page_table",
        "softmax_scale", "causal", "window_size", "softcap", "learnable_sink", "deterministic", "num_splits",
        "scheduler_metadata",
    ),
)  # fmt: skip
_plan: Callable[..., torch.Tensor] | None = None
if hasattr(mate, "get_scheduler_metadata"):
    _plan = checked("FLASH_ATTN", "get_scheduler_metadata", ARGUMENTS)
else:
    logger.warning(
        "FLASH_ATTN on MUSA does not split the keys of a request: this mate has no get_scheduler_metadata. Decodes of "
        "few requests with long contexts use only a part of the GPU; install mate 0.2.2 or later"
    )


@dataclasses.dataclass
class MusaFlashAttentionMetadata(FlashAttentionMetadata):  # type: ignore[misc]  # as below
    """vLLM's metadata plus the key splits per number of query heads (empty: no split)."""

    schedules: Mapping[int, Schedule] = dataclasses.field(default_factory=dict)


class MusaFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's builder with mate's schedules, and without vLLM's schedules and cascade attention."""

    # As for FlashAttention 2: all requests of a graph's batch have equally many tokens.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False
        speculative = self.vllm_config.speculative_config
        # Most tokens of a decode: the last token, and drafts to verify.
        self.decode_len = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
        # Results must then not depend on the lengths of other requests.
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._schedules: Schedules | None = None

    @property
    def makes_schedules(self) -> bool:
        """Whether schedules split keys; graphs read them, and each `build` refreshes them."""
        return _plan is not None and not self.batch_invariant

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # From 0.24.0 on the ranges are here in every step; before, vLLM adds them to the metadata after this call.
        _refuse_images(getattr(common_attn_metadata, "mm_req_doc_ranges", None))
        metadata = MusaFlashAttentionMetadata(
            **vars(super().build(common_prefix_len, common_attn_metadata, fast_build))
        )
        # `fast_build` is for a drafter, whose chain of steps may be one graph without a build in between. Otherwise the
        # lengths decide, and a graph's shape fixes them: a graph captured with a schedule is replayed with a schedule
        # refreshed here, even for a prompt as short as a decode.
        if not fast_build and not self.batch_invariant and metadata.max_query_len <= self.decode_len:
            metadata.schedules = self._scheduled(metadata)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        # vLLM's shortcut for KV cache groups that differ only in their blocks. Graphs are captured without it, so they
        # read this builder's schedules, not the schedules of the group that built the metadata.
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        if updated.schedules:
            updated.schedules = self._scheduled(updated)
        return updated

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _scheduled(self, metadata: Any) -> Mapping[int, Schedule]:
        if _plan is None or not isinstance(metadata.causal, bool):
            return {}
        if self._schedules is None:
            # In the first batch: a builder may be made before its layers.
            self._schedules = Schedules(
                _plan,
                heads={layer.impl.num_heads for layer in self._layers() if layer.impl.sinks is None},
                kv_heads=self.kv_cache_spec.num_kv_heads,
                head_size=self.kv_cache_spec.head_size,
                dtype=self.kv_cache_spec.dtype,
                page_size=self.kv_cache_spec.block_size,
                window=getattr(self.kv_cache_spec, "sliding_window", None),
                compute_units=current_platform.num_compute_units(self.device.index or 0),
                most=self.attention_config.flash_attn_max_num_splits_for_cuda_graph,
            )
        return self._schedules.of(metadata)

    def _layers(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        named = [layers[name] for name in self.layer_names if name in layers]
        return [layer for layer in named if isinstance(layer.impl, MusaFlashAttentionImpl)]

    def warm_up(self, *, drafts: bool = False, causal: bool = True) -> int:
        """Compile this builder's kernels by calling each once; return the calls.

        Nothing is written to the KV cache.
        """
        calls = 0
        # One layer per set of kernels.
        for layer in {layer.impl.kernels_of(layer): layer for layer in self._layers()}.values():
            for common, drafted in dummy_batches(self, causal=causal, drafts=drafts):
                metadata = self.build_for_drafting(common, 0) if drafted else self.build(0, common)
                layer.impl.call_with_zeros(layer, metadata)
                calls += 1
        return calls


class MusaFlashAttentionImpl(AttentionImpl):  # type: ignore[misc]  # as below
    """Attention of decoder layers.

    Raises:
        ValueError: The backend does not support the layer.
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
        for value, supports, name in (
            (head_size, backend.supports_head_size, "head size"),
            (kv_cache_dtype, backend.supports_kv_cache_dtype, "KV cache type"),
            (attn_type, backend.supports_attn_type, "attention type"),
        ):
            if not supports(value):
                raise ValueError(f"FLASH_ATTN on MUSA does not support {name} {value}; use TRITON_ATTN")
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
        """Convert the layer's sinks to bfloat16, the only type mate takes.

        Converting in ``forward`` would add a cast to every step and graph. vLLM calls this again after it has loaded
        other weights; graphs hold the address of the first copy, so the new sinks are written there.
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
        """Compute attention of ``query`` over the cache into ``output``.

        ``query`` is (tokens, heads, head size).

        Raises:
            NotImplementedError: The backend does not support the batch.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FLASH_ATTN on MUSA does not quantize its output")
        if attn_metadata is None:
            # vLLM's memory profiling, which has no cache.
            return output.fill_(0)
        causal = attn_metadata.causal
        if not isinstance(causal, bool):
            raise NotImplementedError(
                "FLASH_ATTN on MUSA needs one mask for all requests (causal or not), found one per request; use "
                "TRITON_ATTN"
            )
        _refuse_images(getattr(attn_metadata, "mm_prefix_range", None))
        tokens = attn_metadata.num_actual_tokens
        keys, values = split(kv_cache, self.head_size)
        # mate cannot split with sinks.
        schedule = attn_metadata.schedules.get(self.num_heads) if self.sinks is None else None
        # 0: mate decides; mate 0.2.2 does not split without a schedule.
        whole = 1 if self.batch_invariant else 0
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
            deterministic=self.batch_invariant,
            num_splits=whole if schedule is None else schedule.splits,
            scheduler_metadata=None if schedule is None else schedule.tensor,
        )
        return output

    def kernels_of(self, layer: torch.nn.Module) -> tuple[Any, ...]:
        """Return what decides which kernels of mate a layer uses."""
        window = self.sliding_window if self.sliding_window[0] >= 0 else None
        heads = (self.num_heads, self.num_kv_heads, self.head_size, layer.kv_cache.dtype, layer.kv_cache.shape[1:])
        return (*heads, window, self.logits_soft_cap != 0, self.sinks is None)

    def call_with_zeros(self, layer: torch.nn.Module, metadata: Any) -> None:
        """Run attention of zero queries; the cache is only read."""

        def zeros(heads: int) -> torch.Tensor:
            return layer.kv_cache.new_zeros(metadata.num_actual_tokens, heads, self.head_size)

        query, key, value = zeros(self.num_heads), zeros(self.num_kv_heads), zeros(self.num_kv_heads)
        self.forward(layer, query, key, value, layer.kv_cache, metadata, torch.empty_like(query))

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
        """Return the block size to use if the user names none."""
        return default_block_size if default_block_size % MUSA.page == 0 else max(default_block_size, MUSA.page)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why a KV cache type does not fit.

        vLLM's answer depends on CUDA architectures.
        """
        return other_type("FLASH_ATTN", dtype, kv_cache_dtype)


def _refuse_images(ranges: Mapping[int, list[Any]] | None) -> None:
    if has_images(ranges):
        raise NotImplementedError(
            "FLASH_ATTN on MUSA runs this model only with text: attention within an image is bidirectional, and mate "
            "has no mask for it. Start with --language-model-only to refuse requests with images, or use TRITON_ATTN"
        )
