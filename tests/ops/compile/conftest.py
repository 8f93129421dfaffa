# SPDX-License-Identifier: Apache-2.0
"""A compiler that only writes files, and a source tree of one kernel, so that builds are tested without CUDA."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_hwplugin.ops.compile import built, jit, toolchain
from vllm_hwplugin.ops.compile.plan import BuildPlan, make_plan
from vllm_hwplugin.ops.compile.spec import KernelSpec
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

COMPILER = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; fi
echo "$@" >> "$here/calls"
while [ -e "$here/held" ]; do sleep 0.05; done
if [ -e "$here/hangs" ]; then echo $$ > "$here/hangs"; sleep 60; fi
if [ -e "$here/dies" ]; then case "$*" in *load-cluster*) . "$here/dies";; esac; fi
if [ -e "$here/broken" ]; then echo "error: the compiler is broken"; exit 1; fi
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo built > "$2"; fi; shift; done
"""


@dataclass(frozen=True)
class Nvcc:
    """``calls`` has a line for each command that it ran."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def calls(self) -> list[str]:
        log = self.path.with_name("calls")
        return log.read_text().splitlines() if log.exists() else []

    def set(self, state: str, on: bool = True) -> None:
        mark = self.path.with_name(state)
        if on:
            mark.touch()
        else:
            mark.unlink()


@pytest.fixture
def nvcc(tmp_path: Path) -> Nvcc:
    found = Nvcc(tmp_path / "cuda")
    found.path.parent.mkdir(parents=True)
    found.path.write_text(COMPILER)
    found.path.chmod(0o755)
    return found


@pytest.fixture
def ninja() -> None:
    if shutil.which("ninja") is None:
        pytest.importorskip("ninja", reason="ninja is neither on PATH nor installed")


@pytest.fixture
def kernel() -> KernelSpec:
    return KernelSpec("sample", "it is slow")


@pytest.fixture
def csrc(tmp_path: Path, kernel: KernelSpec) -> Path:
    """A folder `csrc` whose name a shell and ninja have to be told literally."""
    root = tmp_path / "a $place: with blanks" / "csrc"
    (root / kernel.name).mkdir(parents=True)
    (root / kernel.name / f"{kernel.name}.cu").write_text("// the source\n")
    return root


@pytest.fixture
def torch_cuda(tmp_path: Path) -> TorchBuild:
    return TorchBuild(Version("2.13.0+cu130"), tmp_path / "torch", cuda="13.0", capabilities=((9, 0),))


@pytest.fixture
def torch_musa(torch_cuda: TorchBuild, tmp_path: Path) -> TorchBuild:
    """A PyTorch beside torch_musa, which gives its version as the toolkit's header has it."""
    return dataclasses.replace(torch_cuda, cuda=None, musa_root=tmp_path / "torch_musa", capabilities=((3, 1),))


MakePlan = Callable[..., BuildPlan]


@pytest.fixture
def plan(nvcc: Nvcc, kernel: KernelSpec, csrc: Path, torch_cuda: TorchBuild) -> MakePlan:
    """`make_plan` for the fake compiler; keywords replace its arguments."""

    def call(**changes: object) -> BuildPlan:
        arguments = {
            "kernel": kernel,
            "toolchain": toolchain.find("nvcc", {**os.environ, "CUDA_HOME": str(nvcc.home)}),
            "torch": torch_cuda,
            "environ": {},
            "root": csrc,
        }
        return make_plan(**{**arguments, **changes})  # type: ignore[arg-type]

    return call


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, csrc: Path, nvcc: Nvcc) -> Path:
    """This process sees the sample tree, the fake compiler, an empty cache and no library of a wheel."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(cache))
    monkeypatch.setenv("CUDA_HOME", str(nvcc.home))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(jit, "source_root", lambda: csrc)
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(built, "prebuilt_folder", lambda: tmp_path / "prebuilt")
    # The second place for a cache is one that this user's other processes share.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir(mode=0o700)
    return cache


@pytest.fixture
def provide(own_cache: Path, kernel: KernelSpec, torch_cuda: TorchBuild) -> Callable[..., Path]:
    """`jit.provide` for the sample kernel, with another environment where one is given."""
    return partial(jit.provide, kernel, torch_cuda)
