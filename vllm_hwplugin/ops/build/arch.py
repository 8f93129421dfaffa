# SPDX-License-Identifier: Apache-2.0
"""Which GPU architectures a kernel is compiled for: what the variable says, else what the devices are.

``TORCH_CUDA_ARCH_LIST`` is written as PyTorch's extension builder takes it (``9.0;8.6+PTX``, ``9.0a``), but for its
names of GPU families. ``MTGPU_TARGET`` (``mp_31``, or several separated by ``;``) is the variable that torchada reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from .errors import KernelUnavailable
from .spec import ToolchainName

VARIABLES: Final[Mapping[ToolchainName, str]] = {"nvcc": "TORCH_CUDA_ARCH_LIST", "mcc": "MTGPU_TARGET"}

_CUDA: Final = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_MUSA: Final = re.compile(r"mp_\d+")


def arch_flags(
    toolchain: ToolchainName,
    environ: Mapping[str, str],
    capabilities: Sequence[tuple[int, int]],
    cuda_only: Sequence[str] = (),
) -> tuple[str, ...]:
    """The flags that name architectures.

    Args:
        toolchain: which compiler.
        environ: where its variable is read; set but empty counts as not set.
        capabilities: (major, minor) of each device of this host.
        cuda_only: the architectures that the kernel is for, with their suffixes; empty for all. Of these it is compiled
            for the ones whose numbers are asked for.

    Raises:
        KernelUnavailable: the variable cannot be read, or it is not set and there is no device, or the kernel is for
            other architectures.
    """
    variable = VARIABLES[toolchain]
    named = [part for part in re.split(r"[;,\s]+", environ.get(variable, "")) if part]
    if not named and not capabilities:
        example = "9.0" if toolchain == "nvcc" else "mp_31"
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
    for part in parts:
        if not _MUSA.fullmatch(part):
            raise KernelUnavailable(f"{variable} holds {part!r}; expected architectures such as mp_31, separated by ;")
    return tuple(dict.fromkeys(f"--offload-arch={part}" for part in parts))


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
