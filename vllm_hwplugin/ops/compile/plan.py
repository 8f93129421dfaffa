# SPDX-License-Identifier: Apache-2.0
"""The plan of one build, made before anything is written: flags, commands and the key of the result.

The key is a digest of everything that can change the library: the texts of the kernel's folders, the flags, the
versions of PyTorch and the compiler, and the compiler's environment. It contains no paths, so a moved tree finds its
builds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from .arch import arch_flags
from .flags import FlagRow, flags_for, words
from .port import CUDA_SUFFIX, MUSA_SUFFIX, Port
from .spec import KernelSpec, KernelUnavailable, ToolchainName
from .toolchain import Toolchain
from .torch_build import TorchBuild

#: Part of the key and of each record; raised when a command changes without changing the key.
FORMAT: Final = 1

#: The first release with every call of the stable ABI that the kernels make.
MIN_TORCH: Final = Version("2.10")

# libtorch.so loads PyTorch's CUDA or MUSA part; some linkers would drop it as not needed. Unneeded symbols contain the
# names of nvcc's temporary files, and with them the process id.
_LINKER: Final[Mapping[ToolchainName, tuple[str, ...]]] = {
    "nvcc": ("-Xlinker=--no-as-needed", "-Xlinker=--strip-all"),
    "mcc": ("-Wl,--no-as-needed",),
}
# A MUSA build's additions to the stable ABI, such as the current stream, are in a library of torch_musa, which Python
# loads only for torch_musa: unless a kernel's library names it, its weak symbols are null.
_LIBRARIES: Final[Mapping[ToolchainName, tuple[str, ...]]] = {
    "nvcc": ("-ltorch", "-ltorch_cpu", "-lc10"),
    "mcc": ("-ltorch", "-ltorch_cpu", "-lc10", "-lmusa_python", "-lmusart"),
}


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """One library to build.

    Attributes:
        chosen: the flags with their reasons, without architectures.
        arch: the flags that name architectures.
        root: the folder ``csrc``, or a ported copy. Includes are relative to it.
        ccache: the program's path; None to call the compiler directly.
        port: translates the sources to the compiler's language; None if not needed.
    """

    kernel: KernelSpec
    toolchain: Toolchain
    torch: TorchBuild
    chosen: tuple[FlagRow, ...]
    arch: tuple[str, ...]
    root: Path
    ccache: str | None = None
    port: Port | None = None
    suffix: str = CUDA_SUFFIX

    @property
    def library(self) -> str:
        return f"{self.kernel.name}.so"

    @property
    def key(self) -> str:
        """The name of the build in the cache."""
        facts = {
            "format": FORMAT,
            "kernel": self.kernel.name,
            "sources": source_digest(self.root, self.kernel.folders),
            "flags": [*words(self.chosen), *self.arch, *_libraries(self.toolchain.name)],
            "toolchain": [self.toolchain.name, str(self.toolchain.version), *self.toolchain.surroundings],
            "torch": str(self.torch.version),
            "machine": platform.machine(),
            **({} if self.port is None else {"port": self.port.digest}),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]

    def ported(self, folder: Path) -> BuildPlan:
        """Port the sources into ``folder``; return the same build from there.

        Raises:
            KernelUnavailable: the sources cannot be ported.
        """
        if self.port is None:
            return self
        for name in self.kernel.folders:
            self.port.tree(self.root / name, folder / name)
        return dataclasses.replace(self, root=folder, suffix=MUSA_SUFFIX)

    def without_optional_flags(self) -> BuildPlan:
        return dataclasses.replace(self, chosen=tuple(row for row in self.chosen if not row.optional))

    @property
    def source(self) -> Path:
        return self.root / self.kernel.name / f"{self.kernel.name}{self.suffix}"

    def compile_command(self, output: str) -> tuple[str, ...]:
        return (
            *((self.ccache,) if self.ccache else ()),
            self.toolchain.path,
            *words(self.chosen),
            *self.arch,
            f"-I{self.root}",
            f"-I{self.torch.root / 'include'}",
            "-c",
            str(self.source),
            "-o",
            output,
        )

    def link_command(self, compiled: str, output: str) -> tuple[str, ...]:
        """Link the object; nvcc links the CUDA runtime statically."""
        homes = [self.torch.root]
        if self.torch.musa_root is not None:
            homes += [self.torch.musa_root, self.toolchain.home]
        folders = (f"-L{home / 'lib'}" for home in homes)
        return self.toolchain.path, "-shared", compiled, "-o", output, *folders, *_libraries(self.toolchain.name)

    def record(self) -> dict[str, Any]:
        """Return what ``doctor`` shows, and what decides about other hosts."""
        return {
            "format": FORMAT,
            "kernel": self.kernel.name,
            "library": self.library,
            "key": self.key,
            "sources": source_digest(self.root, self.kernel.folders),
            "toolchain": self.toolchain.name,
            "version": str(self.toolchain.version),
            "torch": str(self.torch.version),
            "arch": list(self.arch),
            "flags": [{"flags": list(row.flags), "reason": row.reason} for row in self.chosen],
            "changes_numerics": [flag for row in self.chosen if row.changes_numerics for flag in row.flags],
            "port": None if self.port is None else self.port.origin,
        }


def make_plan(
    kernel: KernelSpec,
    toolchain: Toolchain,
    torch: TorchBuild,
    environ: Mapping[str, str],
    root: Path,
    ccache: str | None = None,
    port: Port | None = None,
    *,
    ahead: bool = False,
) -> BuildPlan:
    """Plan one build.

    Args:
        environ: of switches and, ahead of time, architectures.
        root: the folder ``csrc``.
        ahead: for the architectures that a variable names, if set; else only for this host's devices.

    Raises:
        KernelUnavailable: this compiler does not build the kernel or does not fit this PyTorch, or there is no
            architecture to build for.
    """
    if reason := kernel.excluded.get(toolchain.name):
        raise KernelUnavailable(f"{kernel.name} is not built by {toolchain.name}: {reason}")
    if Version(torch.version.base_version) < MIN_TORCH:
        raise KernelUnavailable(f"torch {torch.version} is too old for the kernels; expected {MIN_TORCH} or later")
    if torch.cuda is not None and Version(torch.cuda).major != toolchain.version.major:
        raise KernelUnavailable(
            f"torch {torch.version} was built with CUDA {torch.cuda} and {toolchain.path} is of CUDA "
            f"{toolchain.version}; expected the same major version: install that toolkit, or set CUDA_HOME to it"
        )
    if toolchain.name == "mcc" and torch.musa_root is None:
        raise KernelUnavailable(
            f"torch {torch.version} has no torch_musa, whose libmusa_python.so has the current stream; install it"
        )
    chosen = flags_for(toolchain.name, toolchain.version, environ)
    arch = arch_flags(toolchain.name, environ if ahead else {}, torch.capabilities, kernel.cuda_arch)
    return BuildPlan(kernel, toolchain, torch, chosen, arch, root, ccache, port)


def _libraries(toolchain: ToolchainName) -> tuple[str, ...]:
    return *_LINKER[toolchain], *_LIBRARIES[toolchain]


def source_digest(root: Path, folders: Sequence[str]) -> str:
    """Digest the names and texts of all files below ``folders`` of ``root``."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*") if path.is_file()):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:20]
