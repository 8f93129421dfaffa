# SPDX-License-Identifier: Apache-2.0
"""The kernels, and how each is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import vllm_hwplugin

from ...base.errors import HwpluginError

ToolchainName = Literal["nvcc", "mcc"]

#: The folder of ``csrc`` with headers of several kernels.
COMMON: Final = "common"
#: The folder of headers only for Hopper, which is not ported to MUSA.
HOPPER: Final = "hopper"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One library: a folder of ``csrc`` with one source of its name.

    Attributes:
        name: of the operation in ``torch.ops.hwplugin``, and of the folder in ``csrc``.
        fallback_cost: the user's cost without the kernel, as the end of a sentence.
        cuda_arch: its only architectures, as in ``TORCH_CUDA_ARCH_LIST``; empty for all.
        excluded: toolchains that do not build it, with the reason. There the operation's torch reference runs.
    """

    name: str
    fallback_cost: str
    cuda_arch: tuple[str, ...] = ()
    excluded: Mapping[ToolchainName, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.name, COMMON, HOPPER) if "9.0a" in self.cuda_arch else (self.name, COMMON)

    def is_for(self, capability: tuple[int, int]) -> bool:
        """Whether it is for an NVIDIA device of this (major, minor)."""
        return not self.cuda_arch or "{}.{}".format(*capability) in {arch.rstrip("af") for arch in self.cuda_arch}


_KERNELS: Final = (
    KernelSpec(
        "merge_attn_states",
        "attention states are merged by about twenty PyTorch operations with temporaries in float32",
    ),
    KernelSpec(
        "fused_qk_norm_rope",
        "norms and rotary embeddings of query and key are about two dozen PyTorch operations with temporaries in "
        "float32",
    ),
    KernelSpec("topk_softmax", "experts are chosen by about ten PyTorch operations, among them a sort of all experts"),
    KernelSpec("rotary_embedding", "keys of a DFlash drafter's context are rotated by about ten PyTorch operations"),
    KernelSpec(
        "paged_attention",
        "layers with heads above 256 run on Triton kernels, which are several times slower",
        cuda_arch=("9.0a",),
        excluded=MappingProxyType(
            {"mcc": "written for Hopper's copy engine and warpgroup products; MUSA has mate's kernels"}
        ),
    ),
    KernelSpec(
        "skinny_linear",
        "cuBLAS computes linear layers of few tokens",
        cuda_arch=("9.0a",),
        excluded=MappingProxyType({"mcc": "written for Hopper's copy engine and its overlap of kernels"}),
    ),
    KernelSpec(
        "silu_and_mul_per_block_quant",
        "activation and quantisation by groups are about a dozen PyTorch operations with temporaries in float32",
    ),
    KernelSpec(
        "rms_norm_dynamic_per_token_quant",
        "norm and quantisation of rows are about a dozen PyTorch operations with temporaries in float32",
    ),
    KernelSpec(
        "log_draft_rows",
        "bytes that draft tokens overwrite in the KV cache are saved by some PyTorch operations for each layer",
    ),
    KernelSpec(
        "restore_draft_rows",
        "rejected draft tokens are taken out of the KV cache by some PyTorch operations for each layer",
    ),
)

KERNELS: Final[Mapping[str, KernelSpec]] = MappingProxyType({spec.name: spec for spec in _KERNELS})


def source_root() -> Path:
    """Return ``csrc``: in an installed package, or next to the package."""
    package = Path(vllm_hwplugin.__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no folder csrc in {package} or next to it; install vllm-hwplugin again")


class KernelUnavailable(HwpluginError):
    """A kernel is missing and cannot be built. The message says what is missing and how to get it."""
