# SPDX-License-Identifier: Apache-2.0
"""What the plugin's FLASH_ATTN is on CUDA and on MUSA: its class, what its kernels hold, and where it is chosen.

The declarations (:mod:`.capabilities`), the classes (:mod:`.cuda`, :mod:`..musa.attention`), the checks of a call
(:mod:`.paged`) and the choice of the platform (``platforms/_cuda_attention.py``, ``musa/_selector.py``) follow from
this. It imports neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Limits:
    """What kernels hold.

    Args:
        largest_head: elements of a head.
        head_multiple: elements; a head is a multiple of it: 16 bytes, one access.
        page_multiple: tokens; a page is a multiple of it: what one copy of keys takes.
        dtypes: of queries, keys and result, as torch names them.
    """

    largest_head: int
    head_multiple: int
    page_multiple: int
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Faster:
    """On devices of a generation the plugin's CUDA kernel is faster than one of vLLM's backends at large heads.

    Its Triton kernels, which serve without it, are not.

    Args:
        major: of the compute capability.
        than: vLLM's name of the backend.
        reason: where that is known from.
    """

    major: int
    than: str
    reason: str


@dataclasses.dataclass(frozen=True)
class LargeHeads:
    """The layers of a backend that run on the plugin's kernels.

    Args:
        above: the head size where they begin: the largest that vLLM's own kernels have.
        declared: the name that their declarations have.
        limits: of every kernel that may serve them. A test compares them with the CUDA kernel's source.
        largest_group: query heads that share a KV head: the rows of the CUDA kernel's tile.
        kernel: the name of the CUDA kernel (``ops/compile/spec.py``).
        faster: what benchmarks have shown; elsewhere vLLM's choice stays where it works.
    """

    above: int
    declared: str
    limits: Limits
    largest_group: int
    kernel: str
    faster: tuple[Faster, ...]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend of vLLM for which the plugin has a class of its own.

    Args:
        name: vLLM's.
        module: where the class is.
        cls: its name.
        declared: the name that its declarations have.
    """

    name: str
    module: str
    cls: str
    declared: str

    @property
    def path(self) -> str:
        """The qualified name of the class, as vLLM takes it."""
        return f"{self.module}.{self.cls}"


@dataclasses.dataclass(frozen=True)
class CudaBackend(Backend):
    """On CUDA.

    Args:
        large: the layers that vLLM's own kernels do not serve.
    """

    large: LargeHeads


@dataclasses.dataclass(frozen=True)
class MusaBackend(Backend):
    """On MUSA.

    Args:
        needs: what importing the class needs, for a message.
        limits: of mate's kernels.
        page: tokens of the pages that mate copies by the copy engine. It takes others, by slower loads.
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
        faster=(
            Faster(9, "TRITON_ATTN", "docs/kernel-benchmarks.md"),
            Faster(9, "FLEX_ATTENTION", "docs/kernel-benchmarks.md"),
        ),
    ),
)
"""vLLM's FlashAttention 2 and 3 up to their largest head, the plugin's kernels above."""

MUSA: Final = MusaBackend(
    name="FLASH_ATTN",
    module="vllm_hwplugin.musa.attention",
    cls="MusaFlashAttentionBackend",
    declared="FLASH_ATTN@musa",
    needs="Moore Threads' mate, from their own index, and a GPU that is visible; the public `mate` is another project",
    limits=Limits(largest_head=512, head_multiple=8, page_multiple=16, dtypes=("float16", "bfloat16")),
    # As of mate 0.2.2.
    page=64,
)
"""mate.flash_attn_varlen_func, with vLLM's FlashAttention for metadata and the shape of the KV cache."""
