# SPDX-License-Identifier: Apache-2.0
"""Which kernels there are, and what is particular about building each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import vllm_hwplugin

from ...errors import HwpluginError

ToolchainName = Literal["nvcc", "mcc"]

#: The folder of ``csrc`` with what several kernels include.
COMMON: Final = "common"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One library: a folder of ``csrc`` and how it is compiled.

    Attributes:
        name: of the operation in ``torch.ops.hwplugin``, and of the folder in ``csrc``.
        sources: the files to compile, relative to that folder.
        fallback_cost: what a user pays where the kernel is not there, as the end of a sentence.
        fast_math: the compiler may use its approximate mathematics; only where parity with the reference holds.
        flags: flags of this kernel alone, by toolchain.
        cuda_arch: the only architectures that it is for, as ``TORCH_CUDA_ARCH_LIST`` writes them; empty for all.
        excluded: toolchains that do not build it, with the reason. Its operation is still defined there, and the torch
            reference serves it.
    """

    name: str
    sources: tuple[str, ...]
    fallback_cost: str
    fast_math: bool = False
    flags: Mapping[ToolchainName, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    cuda_arch: tuple[str, ...] = ()
    excluded: Mapping[ToolchainName, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of ``csrc`` that its sources and headers lie in."""
        return self.name, COMMON

    def is_for(self, capability: tuple[int, int]) -> bool:
        """Whether it is written for such a device of NVIDIA's, (major, minor)."""
        return not self.cuda_arch or "{}.{}".format(*capability) in {arch.rstrip("af") for arch in self.cuda_arch}


MERGE_ATTN_STATES: Final = KernelSpec(
    "merge_attn_states",
    ("merge_attn_states.cu",),
    "attention states are merged by about twenty PyTorch operations with temporaries in float32",
)

FUSED_QK_NORM_ROPE: Final = KernelSpec(
    "fused_qk_norm_rope",
    ("fused_qk_norm_rope.cu",),
    "norms and rotary embeddings of query and key are about two dozen PyTorch operations with temporaries in float32",
)

TOPK_SOFTMAX: Final = KernelSpec(
    "topk_softmax",
    ("topk_softmax.cu",),
    "experts are chosen by about ten PyTorch operations, among them a sort of all experts",
)

PAGED_ATTENTION: Final = KernelSpec(
    "paged_attention",
    ("paged_attention.cu",),
    "layers with heads above 256 run on Triton kernels, which are several times slower",
    # Its approximations are written out where the result can bear them.
    fast_math=False,
    cuda_arch=("9.0a",),
    excluded=MappingProxyType(
        {"mcc": "written for Hopper's copy engine and warpgroup products; MUSA has mate's kernels"}
    ),
)

SILU_AND_MUL_PER_BLOCK_QUANT: Final = KernelSpec(
    "silu_and_mul_per_block_quant",
    ("silu_and_mul_per_block_quant.cu",),
    "activation and quantisation by groups are about a dozen PyTorch operations with temporaries in float32",
    # Parity with vLLM is bit for bit.
    fast_math=False,
)

RMS_NORM_DYNAMIC_PER_TOKEN_QUANT: Final = KernelSpec(
    "rms_norm_dynamic_per_token_quant",
    ("rms_norm_dynamic_per_token_quant.cu",),
    "norm and quantisation of rows are about a dozen PyTorch operations with temporaries in float32",
    # Each rounding but those of the sum is vLLM's.
    fast_math=False,
)

LOG_DRAFT_ROWS: Final = KernelSpec(
    "log_draft_rows",
    ("log_draft_rows.cu",),
    "what draft tokens overwrite in the KV cache is kept by some PyTorch operations for each layer",
)

RESTORE_DRAFT_ROWS: Final = KernelSpec(
    "restore_draft_rows",
    ("restore_draft_rows.cu",),
    "rejected draft tokens are taken out of the KV cache by some PyTorch operations for each layer",
)

KERNELS: Final[Mapping[str, KernelSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            MERGE_ATTN_STATES,
            FUSED_QK_NORM_ROPE,
            TOPK_SOFTMAX,
            PAGED_ATTENTION,
            SILU_AND_MUL_PER_BLOCK_QUANT,
            RMS_NORM_DYNAMIC_PER_TOKEN_QUANT,
            LOG_DRAFT_ROWS,
            RESTORE_DRAFT_ROWS,
        )
    }
)


def source_root() -> Path:
    """The folder ``csrc``: inside the package where it was installed, beside it in a source tree.

    Raises:
        FileNotFoundError: neither is there, so the installation is not complete.
    """
    package = Path(vllm_hwplugin.__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no folder csrc in {package} or beside it; install vllm-hwplugin again")


class KernelUnavailable(HwpluginError):
    """A kernel is not here and cannot be built here. The message says what is missing and how to get it."""
