# SPDX-License-Identifier: Apache-2.0
"""This host's accelerators and compilers, found without importing torch or opening a device.

A tool that is missing, hangs or fails counts as "not found": ``doctor`` must work on a broken host. Moore Threads GPUs
are found through the driver's library, as the platform class does it, else by the vendor's documented file names. Not
run on MUSA hardware.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..musa import host as musa_host
from ..ops.compile import toolchain
from ..ops.compile.spec import KernelUnavailable
from ..ops.compile.toolchain import TOOLS, ToolName, find_tool

Run = Callable[[Sequence[str]], "str | None"]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: str | None = None
    driver: str | None = None
    capability: str | None = None


@dataclass(frozen=True, slots=True)
class Platform:
    """Describe this host's accelerators; ``evidence`` names the tool or file that told it."""

    kind: Literal["cuda", "musa", "cpu"]
    devices: tuple[Device, ...]
    evidence: str


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    path: str | None
    version: str | None


def this_host() -> dict[str, str | int]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count() or 1,
        "python": platform.python_version(),
        "executable": sys.executable,
    }


def run(argv: Sequence[str]) -> str | None:
    """Return a command's output; None: it fails, or exceeds ten seconds."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def find_platform(
    ask: Run = run, root: Path = Path("/"), gpus: Callable[[], Sequence[str]] = musa_host.gpus
) -> Platform:
    """Find this host's accelerators.

    Args:
        gpus: Returns the GPU names of the Moore Threads driver; may raise any error.
    """
    fields = "name,memory.total,driver_version,compute_cap"
    listed = ask(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    devices = tuple(
        Device(*parts)
        for line in (listed or "").splitlines()
        if len(parts := [p.strip() for p in line.split(",")]) == 4
    )
    if devices:
        return Platform("cuda", devices, "nvidia-smi")
    # Containers often have the driver's device files without its tools.
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        model = re.search(r"^Model:\s*(.+)$", _text(folder / "information"), re.MULTILINE)
        devices += (Device(model.group(1).strip() if model else "NVIDIA GPU", driver=_nvidia_driver(root)),)
    if devices:
        return Platform("cuda", devices, f"{root / 'proc/driver/nvidia/gpus'}")
    nothing = "no NVIDIA or Moore Threads driver answered"
    try:
        names = gpus()
    except ModuleNotFoundError:
        names = ()
    except Exception as error:
        # OSError: no driver library; MTMLError: the library refuses. The device files may exist even so.
        names = ()
        nothing += f" ({type(error).__name__}: {error})"
    if names:
        return Platform("musa", tuple(map(Device, names)), "the driver's library, by pymtml")
    nodes = sorted(root.glob("dev/mtgpu.[0-9]*"))
    if nodes:
        return Platform("musa", tuple(Device(f"Moore Threads GPU {node.suffix[1:]}") for node in nodes), str(nodes[0]))
    if root.joinpath("proc/driver/mtgpu").is_dir():
        return Platform("musa", (Device("Moore Threads GPU"),), str(root / "proc/driver/mtgpu"))
    return Platform("cpu", (), nothing)


def find_tools(ask: Run = run, environ: Mapping[str, str] | None = None) -> tuple[Tool, ...]:
    """Find the compilers and build tools for a build of ``csrc``."""
    environ = os.environ if environ is None else environ
    paths = {name: find_tool(name, environ) for name in TOOLS}
    return tuple(Tool(name, path, None if path is None else _version(name, path, ask)) for name, path in paths.items())


def _version(name: ToolName, path: str, ask: Run) -> str | None:
    def answer(argv: Sequence[str]) -> str:
        if (output := ask(argv)) is None:
            raise KernelUnavailable(f"{argv[0]} does not answer")
        return output

    try:
        if name == "nvcc" or name == "mcc":
            return str(toolchain.read_version(name, path, answer))
        match = re.search(r"\d+(?:\.\d+)+", answer([path, "--version"]))
    except KernelUnavailable:
        return None
    return match and match.group()


def _nvidia_driver(root: Path) -> str | None:
    match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _text(root / "proc/driver/nvidia/version"))
    return match.group(1) if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
