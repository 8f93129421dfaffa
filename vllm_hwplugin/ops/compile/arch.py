# SPDX-License-Identifier: Apache-2.0
"""Which GPU architectures a kernel is compiled for: ahead of time what a variable says, else what the devices are.

``TORCH_CUDA_ARCH_LIST`` is written as PyTorch's extension builder takes it (``9.0;8.6+PTX``, ``9.0a``), but for its
names of GPU families. For MUSA ``TORCH_MUSA_ARCH_LIST`` (``22;31``), as torch_musa's builder takes it, comes before
``MTGPU_TARGET`` (``mp_31``), the one architecture that torchada and vllm-musa build their own code for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from .spec import KernelUnavailable, ToolchainName

CUDA_LIST: Final = "TORCH_CUDA_ARCH_LIST"
MUSA_LIST: Final = "TORCH_MUSA_ARCH_LIST"
MUSA_TARGET: Final = "MTGPU_TARGET"

_CUDA: Final = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_MUSA_NUMBER: Final = re.compile(r"\d\d+")
_MUSA: Final = re.compile(r"mp_\d\d+")
# Before mp_31 a warp has 128 threads (torch_musa, TensorModeKernel.mu), and the kernels count on 32.
_WIDE_WARPS: Final = re.compile(r"mp_[12]\d")


def arch_flags(
    toolchain: ToolchainName,
    environ: Mapping[str, str],
    capabilities: Sequence[tuple[int, int]],
    cuda_only: Sequence[str] = (),
) -> tuple[str, ...]:
    """The flags that name architectures.

    Args:
        toolchain: which compiler.
        environ: where its variables are read; set but empty counts as not set. Without any of them the devices decide,
            as they have to for a library that this host is to load.
        capabilities: (major, minor) of each device of this host.
        cuda_only: the architectures that the kernel is for, with their suffixes; empty for all. It is compiled for
            those whose numbers are asked for.

    Raises:
        KernelUnavailable: a variable cannot be read, or none is set and there is no device, or the kernel is for other
            architectures, or one is a MUSA architecture that no kernel is for.
    """
    variable, example = (CUDA_LIST, "9.0") if toolchain == "nvcc" else (MUSA_LIST, "31")
    named = _listed(environ, CUDA_LIST) if toolchain == "nvcc" else _musa(environ)
    if not named and not capabilities:
        raise KernelUnavailable(
            f"no GPU is here to compile for and {variable} is not set; set it, for example to {example}"
        )
    if toolchain == "nvcc":
        parts = named or [f"{major}.{minor}" for major, minor in sorted(set(capabilities))]
        if cuda_only:
            asked = {_number(part) for part in parts}
            parts = [part for part in cuda_only if _number(part) in asked]
            if not parts:
                raise KernelUnavailable(
                    f"the kernel is for {', '.join(cuda_only)} alone; asked for is {', '.join(sorted(asked))}"
                )
        return tuple(dict.fromkeys(flag for part in parts for flag in _gencode(part)))
    parts = named or [f"mp_{major}{minor}" for major, minor in sorted(set(capabilities))]
    if wide := [part for part in parts if _WIDE_WARPS.fullmatch(part)]:
        raise KernelUnavailable(
            f"{' and '.join(wide)} has warps of 128 threads, and the kernels are for warps of 32; build for mp_31 and "
            "later alone"
        )
    return tuple(dict.fromkeys(f"--offload-arch={part}" for part in parts))


def _listed(environ: Mapping[str, str], variable: str) -> list[str]:
    return [part for part in re.split(r"[;,\s]+", environ.get(variable, "")) if part]


def _musa(environ: Mapping[str, str]) -> list[str]:
    """The architectures that are named for MUSA, as mcc takes them."""
    numbers = _listed(environ, MUSA_LIST)
    for number in numbers:
        if not _MUSA_NUMBER.fullmatch(number):
            raise KernelUnavailable(f"{MUSA_LIST} holds {number!r}; expected numbers such as 31, separated by ;")
    if numbers:
        return [f"mp_{number}" for number in numbers]
    target = environ.get(MUSA_TARGET, "").strip()
    if target and not _MUSA.fullmatch(target):
        # Also a list: torchada would take it for one architecture, and its own build would fail.
        raise KernelUnavailable(
            f"{MUSA_TARGET} is {target!r}; expected one architecture such as mp_31. {MUSA_LIST} takes several, such as "
            "22;31"
        )
    return [target] if target else []


def _number(part: str) -> str:
    return ".".join(_parse(part).group(1, 2))


def _parse(part: str) -> re.Match[str]:
    match = _CUDA.fullmatch(part)
    if match is None:
        raise KernelUnavailable(
            f"TORCH_CUDA_ARCH_LIST holds {part!r}; expected numbers such as 9.0, 9.0a or 8.6+PTX, separated by ;"
        )
    return match


def _gencode(part: str) -> tuple[str, ...]:
    match = _parse(part)
    number = "".join(match.group(1, 2, 3))
    code = f"-gencode=arch=compute_{number},code=sm_{number}"
    return (code, f"-gencode=arch=compute_{number},code=compute_{number}") if match.group(4) else (code,)
