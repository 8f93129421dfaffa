# SPDX-License-Identifier: Apache-2.0
"""Which flags a compiler gets, and why: one table and one function that reads it.

A row applies when the compiler's version is in its range and its gate (if any) is in the stated position. Rows keep
their order on the command line. No kernel has flags of its own: parity with vLLM is bit for bit, so nvcc may use no
approximate mathematics. The rows for mcc follow the published builds of vllm-musa and mate and were not run on MUSA
hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ... import gates
from .spec import ToolchainName

SLP: Final = "VLLM_HWPLUGIN_SLP"
LOAD_CLUSTER: Final = "VLLM_HWPLUGIN_LOAD_CLUSTER"

_VLLM_MUSA: Final = "MooreThreads/vllm-musa, setup.py"
_MATE: Final = "MooreThreads/mate 0.2.2, mate/jit/attention"
_PR_50: Final = "MooreThreads/vllm-musa, pull request 50"
_CLANG: Final = "clang, controlling floating-point behaviour; mcc is made of it"
_NVCC: Final = "CUDA compiler driver nvcc, command options"
_STABLE_ABI: Final = "PyTorch, LibTorch stable ABI"


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One decision about flags.

    Attributes:
        versions: the compiler versions it is for, as ``packaging`` writes ranges; empty for all.
        flags: in order; an ``-mllvm`` and its value are one decision.
        changes_numerics: the same source may give other results with it.
        source: where it is known from.
        gate: the variable that decides, if one does. ``gate_is`` is the position in which the row applies.
    """

    toolchain: ToolchainName
    versions: str
    flags: tuple[str, ...]
    reason: str
    source: str
    changes_numerics: bool = False
    gate: str | None = None
    gate_is: bool = True


_OPTIMISE: Final = "full optimisation"
_CPLUSPLUS: Final = "what the stable ABI's headers need, and what older compilers still have"
_LIBRARY: Final = "the object becomes part of a shared library"
_ABI_REASON: Final = "calls nothing that PyTorch 2.10 does not have, so that one library serves it and later releases"
_ABI: Final = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)

TABLE: Final[tuple[FlagRow, ...]] = (
    FlagRow("nvcc", "", ("-O3",), _OPTIMISE, _NVCC),
    FlagRow("nvcc", "", ("-std=c++17",), _CPLUSPLUS, _STABLE_ABI),
    FlagRow("nvcc", "", ("-Xcompiler=-fPIC",), _LIBRARY, _NVCC),
    FlagRow("nvcc", "", _ABI, _ABI_REASON, _STABLE_ABI),
    FlagRow(
        "nvcc", "", ("-lineinfo",), "profilers and compute-sanitizer name source lines; code stays the same", _NVCC
    ),
    FlagRow(
        "nvcc",
        ">=13.0",
        ("-frandom-seed=hwplugin",),
        "names what has no name of its own by the source in place of the process, so that builds can be compared",
        _NVCC,
    ),
    FlagRow("mcc", "", ("-mtgpu",), "device code for Moore Threads' GPUs; mate counts on the default", _VLLM_MUSA),
    FlagRow("mcc", "", ("-O3",), _OPTIMISE, _VLLM_MUSA),
    FlagRow("mcc", "", ("-Od3",), "the same for device code, whose level mcc takes apart from the host's", _MATE),
    FlagRow("mcc", "", ("-std=c++17",), _CPLUSPLUS, _STABLE_ABI),
    FlagRow("mcc", "", ("-fPIC",), _LIBRARY, _VLLM_MUSA),
    FlagRow("mcc", "", _ABI, _ABI_REASON, _STABLE_ABI),
    FlagRow("mcc", "", ("-DNDEBUG",), "no assertions in device code: vllm-musa and mate have none either", _MATE),
    FlagRow(
        "mcc",
        "",
        ("-fno-strict-aliasing",),
        "kernels read packs of 16 bytes as values of other types; vllm-musa and mate are built with it",
        _MATE,
    ),
    FlagRow("mcc", "", ("-DUSE_MUSA",), "names the platform to sources that serve two", _VLLM_MUSA),
    FlagRow(
        "mcc",
        "",
        ("-fno-signed-zeros",),
        "the sign of zero need not be kept; part of the set that was measured together",
        _PR_50,
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "",
        ("-ffast-math", "-fmusa-flush-denormals-to-zero"),
        "approximate mathematics, denormals flushed: how vllm-musa builds every kernel",
        _VLLM_MUSA,
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "",
        ("-fno-finite-math-only",),
        "takes back the part of -ffast-math that forgets infinities and NaN, which the kernels ask for",
        _CLANG,
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        "<=5.0.0",
        ("-mllvm", "-vectorize-slp=false"),
        "workaround: SLP vectorisation stays off up to this compiler",
        _PR_50,
        changes_numerics=True,
    ),
    FlagRow(
        "mcc",
        ">5.0.0",
        ("-mllvm", "-vectorize-slp=false"),
        "opted out of SLP vectorisation, which changes how kernels accumulate and with it draft acceptance",
        _PR_50,
        changes_numerics=True,
        gate=SLP,
        gate_is=False,
    ),
    FlagRow(
        "mcc",
        ">=4.3.6",
        ("-mllvm", "-mtgpu-load-cluster-mutation=1", "-mllvm", "--num-dwords-of-load-in-mutation=64"),
        "clusters loads; mate gives the options to every compiler from its oldest on, where vllm-musa begins after "
        "5.0.0 out of caution: one that does not know them fails, and of earlier ones nothing is known",
        _MATE,
        gate=LOAD_CLUSTER,
    ),
)


def flags_for(toolchain: ToolchainName, version: Version, environ: Mapping[str, str] | None) -> tuple[FlagRow, ...]:
    """The flags without architectures and include folders.

    Args:
        toolchain: which compiler.
        version: its version; a pre-release counts as a version of its range.
        environ: where the gates are read; ``os.environ`` by default.

    Raises:
        GateError: a gate that decides here has a bad value.
    """
    return tuple(
        row
        for row in TABLE
        if row.toolchain == toolchain
        and SpecifierSet(row.versions).contains(version, prereleases=True)
        and (row.gate is None or gates.read(row.gate, environ).flag is row.gate_is)
    )


def words(rows: tuple[FlagRow, ...]) -> tuple[str, ...]:
    """The flags as they stand on the command line."""
    return tuple(flag for row in rows for flag in row.flags)
