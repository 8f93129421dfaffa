# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on CUDA: vLLM's own FlashAttention for heads of up to 256, and the plugin's kernel for larger ones.

One backend, chosen layer by layer: a model of the gemma-4 kind has sliding layers of 256 and full ones of 512. Metadata
and KV cache are those of vLLM's FlashAttention in both cases. vLLM's kernel writes the cache; it takes any head size. A
large head needs no version of FlashAttention: FlashAttention 3 ends at 256, and 4 needs packages that not every host
has.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id
from vllm.version import __version__

from .backends import CUDA
from .capabilities import LARGEST_OF_VLLM, declared, explain
from .classes import declares
from .flash import captures_short_queries, has_images, split, symmetric

_IMAGES = (
    "FLASH_ATTN with heads above 256 has no mask for images whose tokens see each other in both directions; start with "
    "--language-model-only so that images are refused at the request, or use TRITON_ATTN"
)


def this_device() -> torch.device:
    """The device of this process."""
    device = torch.device(current_platform.device_type)
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def reserve(device: torch.device) -> tuple[Any, ...]:
    """The scratch of a device, one for each batch that runs at a time."""
    config = get_current_vllm_config_or_none()
    count = config.parallel_config.num_ubatches if config is not None and config.parallel_config.use_ubatching else 1
    return tuple(_scratch(device, number) for number in range(count))


def of_this_batch(scratch: tuple[Any, ...]) -> Any:
    """The piece that the calling thread may write to."""
    return scratch[0] if len(scratch) == 1 else scratch[dbo_current_ubatch_id()]


# Memory in which the large-head kernel leaves the results of its splits: one piece for all layers of a process, which
# run one after the other. With dual-batch overlap (`--enable-dbo`) two halves of a batch run at the same time, and each
# has its own. It is taken while the model is built, so that vLLM's memory profiling counts it and captured graphs keep
# its address. The layers alone hold it: what an engine took goes with it. In sleep mode it may lie in a pool that is
# unmapped while the engine sleeps, and the next engine of the process must not find it.
_taken: weakref.WeakValueDictionary[tuple[torch.device, int], Any] = weakref.WeakValueDictionary()


def _scratch(device: torch.device, number: int) -> Any:
    found = _taken.get((device, number))
    if found is None:
        from .paged import Scratch

        found = _taken[device, number] = Scratch.allocate(device)
    return found


class CudaFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's; for layers with large heads without what only its own kernels have: their schedules and cascades."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        # The plugin's kernel reads all lengths on the device, so a graph of it holds any batch up to the longest query
        # that it was captured with.
        support = AttentionCGSupport.ALWAYS
        if min(_head_sizes(kv_cache_spec)) <= LARGEST_OF_VLLM:
            support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if captures_short_queries(vllm_config):
            # FlashAttention 3 drops the causal mask, too, where the longest query is said to have one token.
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
        # Here from 0.24.0 on; before, vLLM writes them into the metadata after this.
        if self.large and has_images(getattr(common_attn_metadata, "mm_req_doc_ranges", None)):
            raise NotImplementedError(_IMAGES)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        # Up to 0.31.
        return not self.large and bool(super().use_cascade_attention(*args, **kwargs))


class LargeHeadAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]  # as below
    """Decoder attention with heads above 256.

    A subclass of vLLM's for its ``do_kv_cache_update``, and because vLLM's metadata builders plan their schedules by
    the windows of all layers of that class. Its ``__init__`` is not run: that settles on a version of FlashAttention.

    Raises:
        ValueError: the layer needs what is not declared for such heads.
    """

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False

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
        asked = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype, "attn_type": attn_type}
        refused = explain(declared(CUDA.large.declared, __version__), asked)
        if alibi_slopes is not None:
            refused.append("FLASH_ATTN with heads above 256 has no ALiBi; use TRITON_ATTN")
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            refused.append(
                "FLASH_ATTN with heads above 256 does not run in context parallelism; use tensor parallelism"
            )
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            refused.append(f"sinks have shape {tuple(sinks.shape)}, expected one for each head: ({num_heads},)")
        from .paged import kernel_for, paged_attention, refuse_heads

        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if (reason := refuse_heads(self.num_heads, self.num_kv_heads)) is not None:
            refused.append(f"FLASH_ATTN with heads above 256: {reason}; use --attention-backend TRITON_ATTN")
        if refused:
            raise ValueError("; ".join(refused))
        self._attention = paged_attention
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.alibi_slopes = None
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        # The kernel reads them as float32. They are loaded after this, so they are copied in each step, by the device.
        self._float32_sinks = None if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
        self.vllm_flash_attn_version = None
        self.supports_quant_query_input = False
        self.batch_invariant_enabled = bool(envs.VLLM_BATCH_INVARIANT)
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
        """Attention of ``query`` (tokens, heads, head size) over the cache, into ``output``.

        Raises:
            NotImplementedError: asked for what is not declared for such heads.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FLASH_ATTN with heads above 256 does not quantize its output")
        if attn_metadata is None:
            # vLLM measures memory, with no cache yet.
            return output.fill_(0)
        causal = attn_metadata.causal
        if not isinstance(causal, bool):
            raise NotImplementedError(
                "FLASH_ATTN with heads above 256 has one mask for all requests: causal, or not; use TRITON_ATTN"
            )
        if has_images(getattr(attn_metadata, "mm_prefix_range", None)):
            raise NotImplementedError(_IMAGES)
        if getattr(attn_metadata, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError("FLASH_ATTN with heads above 256 has no mask for reference sliding windows")
        sinks = self.sinks
        if sinks is not None and self._float32_sinks is not None and sinks.dtype != torch.float32:
            sinks = self._float32_sinks.copy_(sinks)
        tokens = attn_metadata.num_actual_tokens
        keys, values = split(kv_cache, self.head_size)
        self._attention(
            query[:tokens],
            keys,
            values,
            output[:tokens],
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            causal=causal,
            window=symmetric(self.sliding_window, causal),
            softcap=self.logits_soft_cap,
            sinks=sinks,
            kernel=self._kernel,
            scratch=of_this_batch(self._scratch),
            batch_invariant=self.batch_invariant_enabled,
        )
        return output


class CudaFlashAttentionImpl(FlashAttentionImpl):  # type: ignore[misc]  # as below
    """What vLLM makes a layer's implementation with: it gives vLLM's own, or the one for large heads."""

    def __new__(cls, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> Any:
        made = LargeHeadAttentionImpl if head_size > LARGEST_OF_VLLM else FlashAttentionImpl
        return made(num_heads, head_size, *args, **kwargs)


@declares(CUDA.declared, __version__, above=(CUDA.large.above, CUDA.large.declared))
class CudaFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FlashAttention, whose cache and metadata it keeps, with larger heads."""

    @staticmethod
    def get_impl_cls() -> type[CudaFlashAttentionImpl]:
        return CudaFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CudaFlashAttentionMetadataBuilder]:
        return CudaFlashAttentionMetadataBuilder

    @classmethod
    def refuse_above(
        cls,
        *,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        device_capability: Any,
        **_: Any,
    ) -> list[str]:
        """What rules out a layer with a large head beside the declarations; arguments as vLLM asks."""
        if not cls.supports_compute_capability(device_capability):
            return [f"compute capability is {device_capability}, expected 8.0 or later"]
        kv_dtype = dtype if kv_cache_dtype in (None, "auto") else getattr(torch, str(kv_cache_dtype))
        if kv_dtype != dtype:
            return [
                f"FLASH_ATTN with heads above 256 needs keys of the queries' type {dtype}, and the KV cache is "
                f"{kv_cache_dtype}; use --kv-cache-dtype auto"
            ]
        from .paged import refuse

        reason = refuse(head_size, dtype, kv_dtype, _ANY_BLOCK_SIZE if block_size is None else block_size)
        return [] if reason is None else [reason]


# Asked about where the user has left the block size to vLLM, which then takes one that the backend declares.
_ANY_BLOCK_SIZE = CUDA.large.limits.page_multiple


def _head_sizes(kv_cache_spec: Any) -> list[int]:
    """Of the layers of a KV cache group, whose spec may hold one for each of them."""
    specs = getattr(kv_cache_spec, "kv_cache_specs", None)
    return [spec.head_size for spec in specs.values()] if specs else [kv_cache_spec.head_size]


def _without_warmup(vllm_config: Any) -> Any:
    """The configuration, in which vLLM 0.30 and later do not compile FlashAttention 4 ahead for the layers."""
    kernel_config = getattr(vllm_config, "kernel_config", None)
    if not getattr(kernel_config, "enable_jit_warmup", False):
        return vllm_config
    quiet = copy.copy(vllm_config)
    quiet.kernel_config = copy.copy(kernel_config)
    quiet.kernel_config.enable_jit_warmup = False
    return quiet
