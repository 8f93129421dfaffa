# SPDX-License-Identifier: Apache-2.0
"""Find nvcc or mcc, and its version."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from packaging.version import Version

from .spec import KernelUnavailable, ToolchainName

ToolName = Literal[ToolchainName, "ninja", "ccache"]

TOOLS: Final[tuple[ToolName, ...]] = get_args(ToolName)

#: Variables with a compiler's home, best first, and its default folder.
HOMES: Final[Mapping[ToolchainName, tuple[tuple[str, ...], str]]] = {
    "nvcc": (("CUDA_HOME", "CUDA_PATH"), "/usr/local/cuda"),
    "mcc": (("MUSA_HOME", "MUSA_PATH"), "/usr/local/musa"),
}


def find_tool(name: ToolName, environ: Mapping[str, str]) -> str | None:
    """Return a program's path, or None.

    A compiler: in a variable's home, on PATH, in its default folder. ninja: on PATH, in the distribution `ninja`, which
    installs it next to Python. ccache: on PATH.
    """
    places = [environ.get("PATH", os.defpath)]
    if name == "nvcc" or name == "mcc":
        variables, usual = HOMES[name]
        named = (environ.get(variable) for variable in variables)
        places = [*(f"{home}/bin" for home in named if home), *places, f"{usual}/bin"]
    path = shutil.which(name, path=os.pathsep.join(places))
    if path is None and name == "ninja":
        try:
            package: Any = importlib.import_module("ninja")
        except ImportError:
            return None
        # A folder named ninja on `sys.path` is a package without BIN_DIR.
        folder = getattr(package, "BIN_DIR", None)
        path = None if folder is None else str(Path(folder) / "ninja")
    return path


Ask = Callable[[Sequence[str]], str]

# mcc also prints the version of its clang, so only the line with its own name counts.
_VERSIONS: Final[Mapping[ToolchainName, re.Pattern[str]]] = {
    "nvcc": re.compile(r"^Cuda compilation tools, release [\d.]+, V(\d+(?:\.\d+)+)", re.MULTILINE),
    "mcc": re.compile(r"^mcc version (\d+(?:\.\d+)+)", re.MULTILINE),
}


# The version of mcc's toolkit: 50100 is 5.1.0.
_HEADER: Final = re.compile(r"^[ \t]*#[ \t]*define[ \t]+MUSA_VERSION[ \t]+(\d+)\b", re.MULTILINE)


# Flags that nvcc adds to its command line.
_NVCC_FLAGS: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_NVCC_HOST_COMPILER: Final = "NVCC_CCBIN"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler.

    `surroundings` is what else changes its output, such as flags in variables.
    """

    name: ToolchainName
    path: str
    version: Version
    surroundings: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        return _home(self.path)


def _home(path: str) -> Path:
    return Path(path).resolve().parent.parent


def ask(argv: Sequence[str]) -> str:
    """Return what a compiler prints.

    Raises:
        KernelUnavailable: it does not run, fails, or does not answer within half a minute.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise KernelUnavailable(f"{' '.join(argv)} does not work: {error}; install the compiler again") from error
    return done.stdout


def find(name: ToolchainName, environ: Mapping[str, str] | None = None, ask: Ask = ask) -> Toolchain:
    """Find a compiler by :func:`find_tool`, and its version.

    Raises:
        KernelUnavailable: it is missing, does not run, or its version cannot be read.
    """
    environ = os.environ if environ is None else environ
    path = find_tool(name, environ)
    if path is None:
        variables, usual = HOMES[name]
        raise KernelUnavailable(
            f"no {name} in {' or '.join(variables)}, on PATH or in {usual}; install it, or set {variables[0]}"
        )
    surroundings = _surroundings(environ, ask) if name == "nvcc" else ()
    return Toolchain(name, path, read_version(name, path, ask), surroundings)


def _surroundings(environ: Mapping[str, str], ask: Ask) -> tuple[str, ...]:
    """Return nvcc's flags from variables, and its host compiler's version."""
    surroundings = [f"{variable}={environ[variable]}" for variable in _NVCC_FLAGS if environ.get(variable)]
    host = shutil.which(environ.get(_NVCC_HOST_COMPILER) or "gcc", path=environ.get("PATH", os.defpath))
    if host is not None:
        surroundings.append(ask([host, "--version"]).partition("\n")[0])
    return tuple(surroundings)


def read_version(name: ToolchainName, path: str, ask: Ask = ask) -> Version:
    """Return the version of the compiler at `path`.

    No public source shows the output of every mcc, so an unknown output falls back to the toolkit's header, which every
    build includes.
    """
    output = ask([path, "--version"])
    try:
        return parse_version(name, output)
    except KernelUnavailable as unknown:
        if name != "mcc":
            raise
        header = _home(path) / "include" / "musa.h"
        try:
            defined = _HEADER.search(header.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            trouble = f"cannot be read: {error}"
        else:
            if defined is not None:
                number = int(defined.group(1))
                return Version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")
            trouble = "does not define MUSA_VERSION"
        raise KernelUnavailable(
            f"{unknown}; {header} {trouble}; install the MUSA toolkit again, or set MUSA_HOME to another"
        ) from unknown


def parse_version(name: ToolchainName, output: str) -> Version:
    """Return the version in the output of ``--version``."""
    match = _VERSIONS[name].search(output)
    if match is None:
        raise KernelUnavailable(
            f"the version of {name} cannot be read; expected a line like {_EXAMPLES[name]!r}, found {output!r}"
        )
    return Version(match.group(1))


_EXAMPLES: Final[Mapping[ToolchainName, str]] = {
    "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
    "mcc": "mcc version 5.1.0",
}
