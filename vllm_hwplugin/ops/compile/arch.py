# SPDX-License-Identifier: Apache-2.0
"""GPU architectures of a build: ahead of time from a variable, else from the devices.

``TORCH_CUDA_ARCH_LIST`` has the syntax of PyTorch's extension builder (``9.0;8.6+PTX``, ``9.0a``), without names of GPU
families. For MUSA ``TORCH_MUSA_ARCH_LIST`` (``22;31``) of torch_musa's builder comes before ``MTGPU_TARGET``
(``mp_31``), the single architecture that torchada and vllm-musa build for.
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
# Before mp_31 a warp has 128 threads (torch_musa, TensorModeKernel.mu), and the kernels need 32.
_WIDE_WARPS: Final = re.compile(r"mp_[12]\d")


def arch_flags(
    toolchain: ToolchainName,
    environ: Mapping[str, str],
    capabilities: Sequence[tuple[int, int]],
    cuda_only: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the flags that name architectures.

    Args:
        environ: of the variables; empty values count as not set. Without a variable this host's devices decide.
        capabilities: (major, minor) of each device of this host.
        cuda_only: the kernel's only architectures, with suffixes; empty for all.

    Raises:
        KernelUnavailable: a variable is malformed, or there is no architecture to build for.
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
                    f"the kernel is only for {', '.join(cuda_only)}; found {', '.join(sorted(asked))}"
                )
        return tuple(dict.fromkeys(flag for part in parts for flag in _gencode(part)))
    parts = named or [f"mp_{major}{minor}" for major, minor in sorted(set(capabilities))]
    if wide := [part for part in parts if _WIDE_WARPS.fullmatch(part)]:
        raise KernelUnavailable(
            f"{' and '.join(wide)} has warps of 128 threads, and the kernels are for warps of 32; build only for mp_31 "
            "and later"
        )
    return tuple(dict.fromkeys(f"--offload-arch={part}" for part in parts))


def _listed(environ: Mapping[str, str], variable: str) -> list[str]:
    return [part for part in re.split(r"[;,\s]+", environ.get(variable, "")) if part]


def _musa(environ: Mapping[str, str]) -> list[str]:
    numbers = _listed(environ, MUSA_LIST)
    for number in numbers:
        if not _MUSA_NUMBER.fullmatch(number):
            raise KernelUnavailable(f"{MUSA_LIST} holds {number!r}; expected numbers such as 31, separated by ;")
    if numbers:
        return [f"mp_{number}" for number in numbers]
    target = environ.get(MUSA_TARGET, "").strip()
    if target and not _MUSA.fullmatch(target):
        # Lists are refused, too: torchada would take one for an architecture, and its build would fail.
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
