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
class Limits:
    """Limits of kernels: elements of a head, tokens of a page, torch's names of dtypes.

    A head is a multiple of `head_multiple`, 16 bytes, one access; a page of `page_multiple`, one copy of keys.
    """

    largest_head: int
    head_multiple: int
    page_multiple: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LargeHeads:
    """A backend's layers that run on the plugin's kernels.

    Args:
        above: the largest head size of vLLM's own kernels.
        declared: the name of their declarations.
        limits: of every kernel that may run them. A test compares them with the CUDA kernel's source.
        largest_group: most query heads that share a KV head: the rows of the CUDA kernel's tile.
        kernel: the CUDA kernel's name (``ops/compile/spec.py``).
        faster: (major compute capability, backend of vLLM) that the CUDA kernel is faster than, and the source of the
            measurement. The plugin's Triton kernels are not; elsewhere vLLM's choice stays if it works.
    """

    above: int
    declared: str
    limits: Limits
    largest_group: int
    kernel: str
    faster: Mapping[tuple[int, str | None], str]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of vLLM for which the plugin has its own class; `declared` is the name of its declarations."""

    name: str
    module: str
    cls: str
    declared: str

    @property
    def path(self) -> str:
        """The qualified name of the class, for vLLM."""
        return f"{self.module}.{self.cls}"


@dataclasses.dataclass(frozen=True)
class CudaBackend(Backend):
    """On CUDA; ``large`` are the layers that vLLM's own kernels do not run."""

    large: LargeHeads


@dataclasses.dataclass(frozen=True)
class MusaBackend(Backend):
    """On MUSA.

    Args:
        needs: what importing the class needs, for a message.
        page: tokens of the pages that mate copies by the copy engine; it loads other pages more slowly.
    """

    needs: str
    limits: Limits
    page: int


CUDA: Final = CudaBackend(
    name="FLASH_ATTN",
    module="vllm_hwplugin.attention.cuda",
    cls="CudaFlashAttentionBackend",
    declared="FLASH_ATTN",
    large=LargeHeads(
        above=256,
        declared="FLASH_ATTN>256",
        limits=Limits(
            largest_head=512,
            head_multiple=8,
            page_multiple=16,
            dtypes=("float16", "bfloat16"),
        ),
        largest_group=64,
        kernel="paged_attention",
        # FlashAttention 4 was not measured.
        faster=MappingProxyType(
            {(9, "TRITON_ATTN"): "docs/kernel-benchmarks.md", (9, "FLEX_ATTENTION"): "docs/kernel-benchmarks.md"}
        ),
    ),
)
"""vLLM's FlashAttention 2 and 3 up to their largest head, the plugin's kernels above it."""

MUSA: Final = MusaBackend(
    name="FLASH_ATTN",
    module="vllm_hwplugin.musa.attention",
    cls="MusaFlashAttentionBackend",
    declared="FLASH_ATTN@musa",
    needs="Moore Threads' mate, from their own index, and a GPU that is visible; the public `mate` is another project",
    limits=Limits(largest_head=512, head_multiple=8, page_multiple=16, dtypes=("float16", "bfloat16")),
    # In mate 0.2.2.
    page=64,
)
"""mate.flash_attn_varlen_func, with vLLM's FlashAttention for metadata and the shape of the KV cache."""
