# SPDX-License-Identifier: Apache-2.0
"""Build every kernel while the package is installed. setup.py calls this, and a failure costs only the kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ...base.gates import GateError
from . import toolchain, torch_build
from .ninja import build
from .plan import make_plan
from .port import port_for
from .spec import KERNELS, KernelSpec, KernelUnavailable, ToolchainName
from .toolchain import find_tool

#: The wheel's folder of libraries, below the package.
PREBUILT = "ops/_prebuilt"


def build_all(
    target: Path, root: Path, say: Callable[[str], None], environ: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """Build all kernels that can be built here; return their libraries.

    `target` gets a folder for each kernel in place of its content, `say` a sentence for each library and each failure.
    """
    environ = os.environ if environ is None else environ
    shutil.rmtree(target, ignore_errors=True)
    libraries = []
    try:
        torch = torch_build.installed()
        name = _toolchain_name(torch, environ)
        compiler, port = toolchain.find(name, environ), port_for(name)
    except KernelUnavailable as error:
        say(f"no kernel is built ahead of time: {error}")
        return ()
    ccache = find_tool("ccache", environ)
    for kernel in KERNELS.values():
        try:
            plan = make_plan(kernel, compiler, torch, environ, root, ccache, port, ahead=True)
            folder = target / kernel.name
            folder.mkdir(parents=True)
            libraries.append(build(plan, folder, environ))
        except (KernelUnavailable, GateError, OSError) as error:
            _discard(target, kernel)
            say(f"{kernel.name} is not built ahead of time: {error}")
        else:
            say(f"{kernel.name} is built by {name} {compiler.version} for {' '.join(plan.arch)}")
    return tuple(libraries)


def _toolchain_name(torch: torch_build.TorchBuild, environ: Mapping[str, str]) -> ToolchainName:
    """Return PyTorch's compiler; for a CPU build, the named architectures'."""
    if torch.toolchain is not None:
        return torch.toolchain
    if environ.get("TORCH_CUDA_ARCH_LIST"):
        return "nvcc"
    raise KernelUnavailable(
        f"torch {torch.version} is a CPU build; set TORCH_CUDA_ARCH_LIST to build for hosts with a GPU"
    )


def _discard(target: Path, kernel: KernelSpec) -> None:
    shutil.rmtree(target / kernel.name, ignore_errors=True)
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
