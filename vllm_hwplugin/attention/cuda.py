# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on CUDA: vLLM's own backend, with its capabilities made from the declarations.

Nothing selects it yet: it adds no kernel so far, and vLLM's own class is as good.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.version import __version__

from ._classes import declares
from .capabilities import FLASH_ATTN


@declares(FLASH_ATTN, __version__)
class CudaFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's FlashAttention, whose implementation and metadata it keeps."""
