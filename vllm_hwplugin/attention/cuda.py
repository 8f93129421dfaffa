# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on CUDA: vLLM's FlashAttention for heads of up to 256, and the plugin's kernel for larger heads.

It is one backend, because a model like gemma-4 has sliding layers of 256 and full layers of 512. Metadata and KV cache
are vLLM's in both cases, and vLLM's kernel writes the cache, for any head size. Large heads need no FlashAttention:
version 3 ends at 256, and version 4 needs packages that not every host has.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id
from vllm.version import __version__

from .backends import CUDA, FLASH_ATTN_LARGE, LARGEST_OF_VLLM
from .capabilities import declared, explain
from .classes import declares
from .flash import Decoder, captures_short_queries, has_images, split, symmetric

_IMAGES = (
    "FLASH_ATTN with heads above 256 has no mask for images whose tokens see each other in both directions; start with "
    "--language-model-only so that images are refused at the request, or use TRITON_ATTN"
)


def this_device() -> torch.device:
    device = torch.device(current_platform.device_type)
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def reserve(device: torch.device) -> tuple[Any, ...]:
    """Return the device's scratch, one for each concurrent micro-batch."""
    config = get_current_vllm_config_or_none()
    count = config.parallel_config.num_ubatches if config is not None and config.parallel_config.use_ubatching else 1
    return tuple(_scratch(device, number) for number in range(count))


def of_this_batch(scratch: tuple[Any, ...]) -> Any:
    """Return the scratch of the calling thread."""
    return scratch[0] if len(scratch) == 1 else scratch[dbo_current_ubatch_id()]


# The large-head kernel's memory for split results: one for all layers of a process, which run one after another. With
# dual-batch overlap (`--enable-dbo`) both micro-batches have their own. It is allocated while the model is built, so
# that vLLM's memory profiling counts it and captured graphs keep its address. Only the layers hold it, so it is freed
# with them: in sleep mode it may lie in a pool that is unmapped while the engine sleeps, and the next engine of the
# process must not reuse it.
_taken: weakref.WeakValueDictionary[tuple[torch.device, int], Any] = weakref.WeakValueDictionary()


def _scratch(device: torch.device, number: int) -> Any:
    scratch = _taken.get((device, number))
    if scratch is None:
        from .paged import Scratch

        scratch = _taken[device, number] = Scratch.allocate(device)
    return scratch


class CudaFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's builder, without schedules and cascades of vLLM's kernels for layers with large heads."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        # The plugin's kernel reads all lengths on the device, so its graph runs any batch up to the longest query at
        # capture.
        support = AttentionCGSupport.ALWAYS
        if min(_head_sizes(kv_cache_spec)) <= LARGEST_OF_VLLM:
            support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if captures_short_queries(vllm_config):
            # FlashAttention 3 also drops the causal mask if the longest query is given as one token.
            return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)
        return support

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.large = kv_cache_spec.head_size > LARGEST_OF_VLLM
        super().__init__(
            kv_cache_spec, layer_names, _without_warmup(vllm_config) if self.large else vllm_config, device
        )
        self.vllm_config = vllm_config
        if self.large:
            self.aot_schedule = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # From 0.24.0 on; before, vLLM writes the ranges into the metadata after this.
        if self.large and has_images(getattr(common_attn_metadata, "mm_req_doc_ranges", None)):
            raise NotImplementedError(_IMAGES)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        # Up to 0.31.
        return not self.large and bool(super().use_cascade_attention(*args, **kwargs))


class LargeHeadAttentionImpl(Decoder, FlashAttentionImpl):  # type: ignore[misc]  # as below
    """Decoder attention with heads above 256; refuses layers that need more than is declared for large heads.

    A subclass for vLLM's ``do_kv_cache_update``, and because vLLM's metadata builders plan schedules by the windows of
    all layers of that class. Its ``__init__`` is not called, because it chooses a version of FlashAttention.
    """

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False

    title = "FLASH_ATTN with heads above 256"

    def __init__(self, *layer: Any, **settings: Any) -> None:
        super().__init__(*layer, **settings)
        num_heads, sinks = self.num_heads, self.sinks
        asked = {name: getattr(self, name) for name in ("head_size", "kv_cache_dtype", "attn_type")}
        refused = explain(declared(FLASH_ATTN_LARGE, __version__), asked)
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            refused.append(f"{self.title} does not run in context parallelism; use tensor parallelism")
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            refused.append(f"sinks have shape {tuple(sinks.shape)}, expected one for each head: ({num_heads},)")
        from .paged import Arguments, kernel_for, paged_attention, refuse_heads

        if (reason := refuse_heads(num_heads, self.num_kv_heads)) is not None:
            refused.append(f"{self.title}: {reason}; use --attention-backend TRITON_ATTN")
        if refused:
            raise ValueError("; ".join(refused))
        self._attention, self._arguments = paged_attention, Arguments
        self.num_queries_per_kv = num_heads // self.num_kv_heads
        self.alibi_slopes = None
        # The kernel reads float32. The sinks are loaded later, so the device copies them in each step.
        self._float32_sinks = None if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
        self.vllm_flash_attn_version = None
        self.supports_quant_query_input = False
        device = this_device()
        self._kernel = kernel_for(device)
        self._scratch = reserve(device)

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
        """Write the attention of ``query`` [tokens, heads, head size] into ``output``."""
        if attn_metadata is None:
            # vLLM's memory profiling has no cache yet.
            return output.fill_(0)
        self.refuse_call(attn_metadata, output_scale, output_block_scale)
        causal = attn_metadata.causal
        if has_images(getattr(attn_metadata, "mm_prefix_range", None)):
            raise NotImplementedError(_IMAGES)
        if getattr(attn_metadata, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError(f"{self.title} has no mask for reference sliding windows")
        sinks = self.sinks
        if sinks is not None and self._float32_sinks is not None and sinks.dtype != torch.float32:
            sinks = self._float32_sinks.copy_(sinks)
        tokens = attn_metadata.num_actual_tokens
        keys, values = split(kv_cache, self.head_size)
        given = self._arguments(
            query[:tokens],
            keys,
            values,
            output[:tokens],
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table,
            scale=self.scale,
            causal=causal,
            window=symmetric(self.sliding_window, causal),
            softcap=self.logits_soft_cap,
            sinks=sinks,
        )
        self._attention(
            given,
            max_query_len=attn_metadata.max_query_len,
            kernel=self._kernel,
            scratch=of_this_batch(self._scratch),
            batch_invariant=self.batch_invariant_enabled,
        )
        return output


class CudaFlashAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]  # as below
    """The class that vLLM instantiates for a layer: it returns vLLM's implementation, or the one for large heads."""

    def __new__(cls, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> Any:
        made = LargeHeadAttentionImpl if head_size > LARGEST_OF_VLLM else FlashAttentionImpl
        return made(num_heads, head_size, *args, **kwargs)


@declares(CUDA.declared, __version__, above=(LARGEST_OF_VLLM, FLASH_ATTN_LARGE))
class CudaFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FlashAttention with larger heads, and its cache and metadata."""

    @staticmethod
    def get_impl_cls() -> type[CudaFlashAttentionImpl]:
        return CudaFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CudaFlashAttentionMetadataBuilder]:
        return CudaFlashAttentionMetadataBuilder

    @classmethod
    def refuse_above(cls, asked: Mapping[str, Any]) -> list[str]:
        """Return reasons against a large head that no declaration has."""
        if not cls.supports_compute_capability(asked["device_capability"]):
            return [f"compute capability is {asked['device_capability']}, expected 8.0 or later"]
        dtype, cache_dtype, block_size = asked["dtype"], asked["kv_cache_dtype"], asked["block_size"]
        kv_dtype = dtype if cache_dtype in (None, "auto") else getattr(torch, str(cache_dtype))
        if kv_dtype != dtype:
            return [
                f"FLASH_ATTN with heads above 256 needs keys of the queries' type {dtype}, and the KV cache is "
                f"{cache_dtype}; use --kv-cache-dtype auto"
            ]
        from .paged import refuse

        reason = refuse(asked["head_size"], dtype, kv_dtype, _ANY_BLOCK_SIZE if block_size is None else block_size)
        return [] if reason is None else [reason]


# If the user leaves the block size to vLLM, vLLM takes a declared size.
_ANY_BLOCK_SIZE = CUDA.page_multiple


def _head_sizes(kv_cache_spec: Any) -> list[int]:
    # A KV cache group's spec may hold a spec for each layer.
    specs = getattr(kv_cache_spec, "kv_cache_specs", None)
    return [spec.head_size for spec in specs.values()] if specs else [kv_cache_spec.head_size]


def _without_warmup(vllm_config: Any) -> Any:
    """Return a configuration without FlashAttention 4's warm-up of vLLM 0.30 and later."""
    kernel_config = getattr(vllm_config, "kernel_config", None)
    if not getattr(kernel_config, "enable_jit_warmup", False):
        return vllm_config
    quiet = copy.copy(vllm_config)
    quiet.kernel_config = copy.copy(kernel_config)
    quiet.kernel_config.enable_jit_warmup = False
    return quiet
