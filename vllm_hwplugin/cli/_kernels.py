# SPDX-License-Identifier: Apache-2.0
"""``doctor``'s table of kernels: how each was built, or what is missing and what that costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..ops.compile.built import Built
from ..ops.compile.spec import KERNELS, KernelSpec, ToolchainName
from ..ops.compile.toolchain import HOMES
from ._host import Platform, Tool

_NEEDED: Mapping[str, ToolchainName] = {"cuda": "nvcc", "musa": "mcc"}


@dataclass(frozen=True, slots=True)
class KernelRow:
    kernel: str
    state: Literal["built", "not built"]
    detail: str
    library: str | None = None


def kernel_rows(platform: Platform, libraries: Sequence[Built], tools: Sequence[Tool]) -> tuple[KernelRow, ...]:
    """Return a row per library, and per kernel without a library.

    Args:
        libraries: Built kernels in the wheel and in the cache.
    """
    rows = []
    for spec in KERNELS.values():
        built = [_built(library) for library in libraries if library.kernel == spec.name]
        rows += built or [KernelRow(spec.name, "not built", f"{missing(spec, platform, tools)} {spec.fallback_cost}")]
    return tuple(rows)


def _built(library: Built) -> KernelRow:
    numerics = " ".join(library.changes_numerics) or "none"
    detail = (
        f"{library.toolchain} {library.version}, torch {library.torch}, {' '.join((*library.flags, *library.arch))}; "
        f"flags that change numerics: {numerics}"
    )
    return KernelRow(library.kernel, "built", detail, str(library.library))


def missing(spec: KernelSpec, platform: Platform, tools: Sequence[Tool]) -> str:
    """Return why a kernel has no library here.

    The caller completes the sentence with what runs instead.
    """
    needed = _NEEDED.get(platform.kind)
    if needed is None:
        return "this host has no GPU for it, so"
    if reason := spec.excluded.get(needed):
        return f"{reason}, and until then"
    stated = [device.capability or "" for device in platform.devices]
    # nvidia-smi says "[N/A]" if it does not know.
    numbers = [text.split(".") for text in stated if re.fullmatch(r"\d+\.\d+", text)]
    if needed == "nvcc" and numbers and not any(spec.is_for((int(major), int(minor))) for major, minor in numbers):
        return f"it is only for {', '.join(spec.cuda_arch)}, and"
    paths = {tool.name: tool.path for tool in tools}
    if paths.get(needed) is None:
        return f"{needed} not found (install it, or set {HOMES[needed][0][0]}), and without it"
    if paths.get("ninja") is None:
        return "ninja not found (`pip install ninja`), and without it"
    return f"{needed} builds it at the operation's first use, and until then"
