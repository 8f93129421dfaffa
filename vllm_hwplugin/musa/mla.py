# SPDX-License-Identifier: Apache-2.0
"""FLASHMLA on Moore Threads GPUs, over ``mate.flash_mla_with_kvcache``. Not run on MUSA hardware.

It computes decodes; :mod:`.mla_prefill` computes prompts. KV cache and metadata are vLLM's for MLA.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ._mate import cache_trouble, checked

_attend = checked(
    "FLASHMLA",
    "flash_mla_with_kvcache",
    (
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal",
    ),
)  # fmt: skip
_plan = checked("FLASHMLA", "get_mla_metadata", ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"))

# Elements of a latent and a rotary key, and tokens per page: mate (0.2.2) has kernels only for these.
_LATENT, _ROTARY, _PAGE = 512, 64, 64
_NOT_IN_MLA = ("alibi_slopes", "sliding_window", "logits_soft_cap")


@dataclasses.dataclass
class MusaFlashMLADecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]  # as below
    """vLLM's decode metadata with mate's plan: the parts, (parts, 8), and their cumulative number, (requests + 1,)."""

    parts: torch.Tensor
    num_splits: torch.Tensor


class MusaFlashMLAMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]  # as below
    """vLLM's metadata builder with mate's plan, in one pair of tensors for each graph, which each build refreshes."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plans: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _build_decode(self, **given: Any) -> MusaFlashMLADecodeMetadata:
        requests, tokens = given["seq_lens_device"].shape[0], given["num_decode_tokens"]
        fresh = _plan(
            cache_seqlens=given["seq_lens_device"],
            num_q_tokens_per_head_k=tokens // requests * self.num_heads,
            num_heads_k=1,
        )
        plan = self._plans.setdefault((requests, tokens), fresh)
        if plan is not fresh:
            # An inference tensor is writable only in inference mode, and vLLM builds metadata in and out of it.
            with torch.inference_mode():
                for old, new in zip(plan, fresh, strict=True):
                    old.copy_(new)
        return MusaFlashMLADecodeMetadata(**vars(super()._build_decode(**given)), parts=plan[0], num_splits=plan[1])


class MusaFlashMLAImpl(MLACommonImpl):  # type: ignore[misc]  # as below
    """MLA decode of decoder layers; raises ValueError if mate's kernels do not support the layer."""

    # Context parallelism needs the log-sum-exp, for which mate's docstring and code give different shapes.
    supports_dcp = False
    supports_pcp = False

    def __init__(self, **layer: Any) -> None:
        super().__init__(**layer)
        sizes = (layer["kv_lora_rank"], layer["qk_rope_head_dim"])
        if sizes != (_LATENT, _ROTARY) or any(layer[name] for name in _NOT_IN_MLA):
            raise ValueError(
                f"FLASHMLA on MUSA supports latents and rotary keys of {(_LATENT, _ROTARY)} elements, found {sizes}, "
                f"and no {' or '.join(_NOT_IN_MLA)}; use TRITON_MLA"
            )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention of decodes over latents, (tokens, heads, 512), and None.

        `q` is (tokens, heads, 576) or its parts of 512 and 64 elements, the cache (blocks, 64, 576).
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        out, _ = _attend(
            q=query.unflatten(0, (attn_metadata.num_decodes, -1)),
            k_cache=kv_c_and_k_pe_cache.unsqueeze(-2),
            block_table=decode.block_table,
            cache_seqlens=decode.seq_lens,
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=decode.parts,
            num_splits=decode.num_splits,
            softmax_scale=self.scale,
            causal=True,
        )
        return out.flatten(0, 1), None


class MusaFlashMLABackend(MLACommonBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FLASHMLA by name; without an fp8 cache, because mate has none for dense attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA"

    @staticmethod
    def get_impl_cls() -> type[MusaFlashMLAImpl]:
        return MusaFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MusaFlashMLAMetadataBuilder]:
        return MusaFlashMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [_PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [_LATENT + _ROTARY]

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        return cache_trouble("FLASHMLA", dtype, kv_cache_dtype)
