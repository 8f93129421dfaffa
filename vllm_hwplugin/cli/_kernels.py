# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of the kernels: what each was built with, or what is missing and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..ops.compile.built import Built
from ..ops.compile.spec import KERNELS, KernelSpec, ToolchainName
from ..ops.compile.toolchain import HOMES
from ._host import Tool

_NEEDED: Mapping[str, ToolchainName] = {"cuda": "nvcc", "musa": "mcc"}


@dataclass(frozen=True, slots=True)
class KernelRow:
    kernel: str
    state: Literal["built", "not built"]
    detail: str
    library: str | None = None


def kernel_rows(kind: str, libraries: Sequence[Built], tools: Sequence[Tool]) -> tuple[KernelRow, ...]:
    """One row for each library, and one for each kernel that has none.

    Args:
        kind: of the platform: ``cuda``, ``musa`` or ``cpu``.
        libraries: what lies in the wheel and in the cache.
        tools: the compilers and build tools of this host.
    """
    rows = []
    for spec in KERNELS.values():
        own = [_built(item) for item in libraries if item.kernel == spec.name]
        rows += own or [KernelRow(spec.name, "not built", f"{missing(spec, kind, tools)} {spec.fallback_cost}")]
    return tuple(rows)


def _built(item: Built) -> KernelRow:
    numerics = " ".join(item.changes_numerics) or "none"
    detail = (
        f"{item.toolchain} {item.version}, torch {item.torch}, {' '.join((*item.flags, *item.arch))}; "
        f"flags that change numerics: {numerics}"
    )
    return KernelRow(item.kernel, "built", detail, str(item.library))


def missing(spec: KernelSpec, kind: str, tools: Sequence[Tool]) -> str:
    """Why a kernel has no library here, as the beginning of a sentence that goes on with what serves instead."""
    needed = _NEEDED.get(kind)
    if needed is None:
        return "no GPU is here that it could run on, so"
    if reason := spec.excluded.get(needed):
        return f"{reason}, and until then"
    paths = {tool.name: tool.path for tool in tools}
    if paths.get(needed) is None:
        return f"{needed} is not found (install it, or set {HOMES[needed][0][0]}), and without it"
    if paths.get("ninja") is None:
        return "ninja is not found (`pip install ninja`), and without it"
    return f"{needed} builds it when the operation is first used, and until then"
