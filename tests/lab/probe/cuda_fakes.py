# SPDX-License-Identifier: Apache-2.0
"""Backends for the stand-in of CUDA that are right until a graph is replayed, and one that is never."""

from __future__ import annotations

import copy

from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from vllm_hwplugin.attention.cuda import CudaFlashAttentionBackend, CudaFlashAttentionMetadataBuilder


class _Builder(CudaFlashAttentionMetadataBuilder):
    baked = ""

    def build_for_cudagraph_capture(self, common_attn_metadata):
        """As one that keeps a copy of its own and never looks at the batch's again."""
        metadata = copy.copy(super().build_for_cudagraph_capture(common_attn_metadata))
        setattr(metadata, self.baked, getattr(metadata, self.baked).clone())
        return metadata


def _backend(builder):
    class Backend(CudaFlashAttentionBackend):
        @staticmethod
        def get_builder_cls():
            return builder

    return Backend


class _LengthsBuilder(_Builder):
    baked = "seq_lens"


class _TableBuilder(_Builder):
    baked = "block_table"


BakesLengths = _backend(_LengthsBuilder)
BakesTable = _backend(_TableBuilder)


class _MissingBuilder(CudaFlashAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata.no_such_field


MissesField = _backend(_MissingBuilder)


class WithoutSinksImpl(FlashAttentionImpl):
    """As vLLM's implementations that know no sinks: an argument that is not there."""

    def __init__(self, *shape_to_sharing):
        super().__init__(*shape_to_sharing)


class WithoutSinks(CudaFlashAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return WithoutSinksImpl
