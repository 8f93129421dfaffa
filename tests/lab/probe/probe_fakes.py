# SPDX-License-Identifier: Apache-2.0
"""Backends that do not do what they declare, each in its own way, around vLLM's CPU backend.

The probe's process imports this file by name, as it would a backend of another package.
"""

from __future__ import annotations

import os
import time

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)


class _CausalBuilder(CPUAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return super().build(common_prefix_len, common_attn_metadata.replace(causal=True), fast_build)


class SaysNonCausal(CPUAttentionBackend):
    """Declares non-causal attention and attends causally."""

    @staticmethod
    def get_builder_cls():
        return _CausalBuilder


class SaysNothing(CPUAttentionBackend):
    """Does non-causal attention and does not declare it."""

    @classmethod
    def supports_non_causal(cls):
        return False


class SaysMoreSizes(CPUAttentionBackend):
    """Declares a block size that its kernels refuse."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [8, 32]


class _AbortingImpl(CPUAttentionBackendImpl):
    def forward(self, *arguments, **options):
        if self.alibi_slopes is not None and self.head_size <= 256:
            os.abort()
        return super().forward(*arguments, **options)


class Aborts(CPUAttentionBackend):
    """Ends its process on a layer with ALiBi and a usual head size."""

    @staticmethod
    def get_impl_cls():
        return _AbortingImpl


class _EndlessImpl(CPUAttentionBackendImpl):
    def forward(self, *arguments, **options):
        if self.alibi_slopes is not None and self.head_size > 256:
            time.sleep(3600)
        return super().forward(*arguments, **options)


class Hangs(CPUAttentionBackend):
    """Never answers on a layer with ALiBi and large heads."""

    @staticmethod
    def get_impl_cls():
        return _EndlessImpl


class _ForgetfulImpl(CPUAttentionBackendImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key[:-1], value[:-1], kv_cache, slot_mapping[:-1])


class Forgets(CPUAttentionBackend):
    """Never writes the last key, so that what the cache held before is read instead."""

    @staticmethod
    def get_impl_cls():
        return _ForgetfulImpl


class AsksConfiguration(CPUAttentionBackend):
    """Answers from the current configuration, as vLLM's FlashAttention does up to 0.21."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        assert get_current_vllm_config().model_config is not None
        return CPUAttentionBackend.get_supported_kernel_block_sizes()
