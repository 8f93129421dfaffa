# SPDX-License-Identifier: Apache-2.0
"""The plugin's FLASH_ATTN on CUDA and MUSA: classes, kernel limits, and where it is chosen.

The declarations (:mod:`.capabilities`), the classes (:mod:`.cuda`, :mod:`..musa.attention`), the checks of a call
(:mod:`.paged`) and the platform's choice (``platforms/_cuda_attention.py``, ``musa/_selector.py``) follow from this
module, which imports neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of vLLM for which the plugin has its own class, with the limits of the plugin's kernels.

    A head is a multiple of `head_multiple`, 16 bytes, one access; a page of `page_multiple`, one copy of keys.

    Args:
        declared: the name of its declarations.
        largest_head: elements of a head.
        page_multiple: tokens of a page.
        dtypes: torch's names.
    """

    name: str
    module: str
    cls: str
    declared: str
    largest_head: int = 512
    head_multiple: int = 8
    page_multiple: int = 16
    dtypes: tuple[str, ...] = ("float16", "bfloat16")

    @property
    def path(self) -> str:
        """The qualified name of the class, for vLLM."""
        return f"{self.module}.{self.cls}"


CUDA: Final = Backend("FLASH_ATTN", "vllm_hwplugin.attention.cuda", "CudaFlashAttentionBackend", declared="FLASH_ATTN")
"""vLLM's FlashAttention 2 and 3 up to their largest head, the plugin's kernels above it.

The limits are the plugin's kernels'. A test compares them with the CUDA kernel's source.
"""

#: The largest head of vLLM's FlashAttention 2 and 3, and the declarations of layers with larger heads.
LARGEST_OF_VLLM: Final = 256
FLASH_ATTN_LARGE: Final = "FLASH_ATTN>256"
#: Most query heads that share a KV head: the rows of the CUDA kernel's tile.
LARGEST_GROUP: Final = 64
#: The CUDA kernel's name (``ops/compile/spec.py``).
KERNEL: Final = "paged_attention"
#: (major compute capability, backend of vLLM) that the CUDA kernel is faster than -> source of the measurement. The
#: plugin's Triton kernels are not; elsewhere vLLM's choice stays if it works. FlashAttention 4 was not measured.
FASTER: Final[Mapping[tuple[int, str | None], str]] = MappingProxyType(
    {(9, "TRITON_ATTN"): "docs/kernel-benchmarks.md", (9, "FLEX_ATTENTION"): "docs/kernel-benchmarks.md"}
)

MUSA: Final = Backend(
    "FLASH_ATTN", "vllm_hwplugin.musa.attention", "MusaFlashAttentionBackend", declared="FLASH_ATTN@musa"
)
"""mate.flash_attn_varlen_func, with vLLM's FlashAttention for metadata and the shape of the KV cache."""

#: What importing the class needs, for a message.
MUSA_NEEDS: Final = (
    "Moore Threads' mate, from their own index, and a GPU that is visible; the public `mate` is another project"
)
#: Tokens of the pages that mate (0.2.2) copies by the copy engine; it loads other pages more slowly.
MUSA_PAGE: Final = 64
