# SPDX-License-Identifier: Apache-2.0
"""Compiler flags and their reasons: a table and a function that reads it.

A row applies if the compiler's version is in its range and its switch (if any) has the stated value. Flags keep the
table's order. No kernel has its own flags: parity with vLLM is bit for bit, so nvcc uses no approximate mathematics.
The rows for mcc follow the published builds of vllm-musa and mate and were not run on MUSA hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ...base import gates
from .spec import ToolchainName

SLP: Final = "VLLM_HWPLUGIN_SLP"
LOAD_CLUSTER: Final = "VLLM_HWPLUGIN_LOAD_CLUSTER"


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One decision about flags.

    Attributes:
        versions: compiler versions, a range for ``packaging``; empty for all.
        flags: in order; an ``-mllvm`` and its value belong together.
        changes_numerics: the same source may give other results with it.
        gate: the variable that decides, if any; the row applies if its value is ``gate_is``.
    """

    toolchain: ToolchainName
    versions: str
    flags: tuple[str, ...]
    reason: str
    changes_numerics: bool = False
    gate: str | None = None
    gate_is: bool = True

    @property
    def optional(self) -> bool:
        """Whether the flags only optimise: a switch omits them, and results stay the same."""
        return self.gate is not None and not self.changes_numerics


_OPTIMISE: Final = "full optimisation"
_CPLUSPLUS: Final = "the stable ABI's headers need it, and older compilers have it"
_LIBRARY: Final = "the object becomes part of a shared library"
_ABI_REASON: Final = "calls only what PyTorch 2.10 has, so that one library works with it and later releases"
_ABI: Final = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)

# Sources, next to nvcc's manual and PyTorch's pages on the stable ABI: setup.py of MooreThreads/vllm-musa, its pull
# request 50 (signed zeros, SLP vectorisation), MooreThreads/mate 0.2.2 (mate/jit/attention: -Od3, -DNDEBUG, aliasing,
# load clusters), and the manual of clang, on which mcc is based.
TABLE: Final[tuple[FlagRow, ...]] = (
    FlagRow("nvcc", "", ("-O3",), _OPTIMISE),
    FlagRow("nvcc", "", ("-std=c++17",), _CPLUSPLUS),
    FlagRow("nvcc", "", ("-Xcompiler=-fPIC",), _LIBRARY),
    FlagRow("nvcc", "", _ABI, _ABI_REASON),
    FlagRow("nvcc", "", ("-lineinfo",), "profilers and compute-sanitizer name source lines; code stays the same"),
    FlagRow(
        "nvcc",
        ">=13.0",
        ("-frandom-seed=hwplugin",),
        "names unnamed symbols after the source, not the process, so that builds can be compared",
    ),
    FlagRow("mcc", "", ("-mtgpu",), "device code for Moore Threads' GPUs; mate relies on the default"),
    FlagRow("mcc", "", ("-O3",), _OPTIMISE),
    FlagRow("mcc", "", ("-Od3",), "the same for device code, which has a separate level in mcc"),
    FlagRow("mcc", "", ("-std=c++17",), _CPLUSPLUS),
    FlagRow("mcc", "", ("-fPIC",), _LIBRARY),
    FlagRow("mcc", "", _ABI, _ABI_REASON),
    FlagRow("mcc", "", ("-DNDEBUG",), "no assertions in device code, as in vllm-musa and mate"),
    FlagRow(
        "mcc",
        "",
        ("-fno-strict-aliasing",),
        "kernels read packs of 16 bytes as values of other types; vllm-musa and mate are built with it",
    ),
    FlagRow("mcc", "", ("-DUSE_MUSA",), "names the platform to sources that serve two"),
    FlagRow(
        "mcc",
        "",
        ("-fno-signed-zeros",),
        "the sign of zero does not matter; part of the set that was measured together",
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "",
        ("-ffast-math", "-fmusa-flush-denormals-to-zero"),
        "approximate mathematics, denormals flushed: how vllm-musa builds every kernel",
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "",
        ("-fno-finite-math-only",),
        "undoes the part of -ffast-math that ignores infinities and NaN, which the kernels test for",
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "<=5.0.0",
        ("-mllvm", "-vectorize-slp=false"),
        "workaround: SLP vectorisation stays off up to this compiler",
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        ">5.0.0",
        ("-mllvm", "-vectorize-slp=false"),
        "opted out of SLP vectorisation, which changes how kernels accumulate and with it draft acceptance",
        changes_numerics=True,
        gate=SLP,
        gate_is=False,
    ),
    FlagRow(
        "mcc",
        ">=4.3.6",
        ("-mllvm", "-mtgpu-load-cluster-mutation=1", "-mllvm", "--num-dwords-of-load-in-mutation=64"),
        "clusters loads; mate passes the options to every compiler from its oldest on, and vllm-musa, out of caution, "
        "only after 5.0.0: a compiler without them fails, and nothing is known about earlier compilers",
        gate=LOAD_CLUSTER,
    ),
)


def flags_for(toolchain: ToolchainName, version: Version, environ: Mapping[str, str] | None) -> tuple[FlagRow, ...]:
    """Return the flags except architectures and include folders.

    A pre-release counts as a version of its range.

    Raises:
        GateError: a switch that decides here has a bad value.
    """
    return tuple(
        row
        for row in TABLE
        if row.toolchain == toolchain
        and SpecifierSet(row.versions).contains(version, prereleases=True)
        and (row.gate is None or gates.read(row.gate, environ).flag is row.gate_is)
    )


def words(rows: tuple[FlagRow, ...]) -> tuple[str, ...]:
    """Return the rows' flags for the command line."""
    return tuple(flag for row in rows for flag in row.flags)
