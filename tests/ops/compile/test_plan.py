# SPDX-License-Identifier: Apache-2.0
"""Whole command lines, the key of a build, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin.ops.compile.plan import BuildPlan
from vllm_hwplugin.ops.compile.port import Port
from vllm_hwplugin.ops.compile.spec import KernelSpec, KernelUnavailable
from vllm_hwplugin.ops.compile.toolchain import Toolchain, parse_version
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

MakePlan = Callable[..., BuildPlan]
RECORDINGS = Path(__file__).parent / "recordings"


def _toolchain(recording: str, home: str) -> Toolchain:
    name: Any = recording.partition("-")[0]
    text = (RECORDINGS / f"{recording}.txt").read_text(encoding="utf-8")
    return Toolchain(name, f"{home}/bin/{name}", parse_version(name, text))


@pytest.mark.parametrize("recording", ["nvcc-11.8", "nvcc-12.8", "nvcc-13.0", "nvcc-13.5"])
def test_the_commands_of_nvcc(plan: MakePlan, csrc: Path, torch_cuda: TorchBuild, recording: str) -> None:
    compiler = _toolchain(recording, "/opt/cuda")
    torch = dataclasses.replace(torch_cuda, cuda=f"{compiler.version.major}.0")
    made = plan(toolchain=compiler, torch=torch, environ={"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}, ahead=True)
    assert made.compile_command("sample.o") == (
        "/opt/cuda/bin/nvcc", "-O3", "-std=c++17", "-Xcompiler=-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-lineinfo", *(("-frandom-seed=hwplugin",) if compiler.version.major >= 13 else ()),
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90", f"-I{csrc}", f"-I{torch.root}/include",
        "-c", f"{csrc}/sample/sample.cu", "-o", "sample.o",
    )  # fmt: skip
    assert made.link_command("sample.o", "sample.so") == (
        "/opt/cuda/bin/nvcc", "-shared", "sample.o", "-o", "sample.so", f"-L{torch.root}/lib",
        "-Xlinker=--no-as-needed", "-Xlinker=--strip-all", "-ltorch", "-ltorch_cpu", "-lc10",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recording", "environ"),
    [("mcc-4.2.0", {}), ("mcc-5.1.0", {"VLLM_MUSA_DISABLE_SLP": "1", "VLLM_MUSA_DISABLE_LOAD_CLUSTER": "1"})],
)
def test_the_commands_of_mcc(
    plan: MakePlan, csrc: Path, torch_musa: TorchBuild, recording: str, environ: dict[str, str]
) -> None:
    made = plan(toolchain=_toolchain(recording, "/opt/musa"), torch=torch_musa, environ=environ)
    assert made.compile_command("sample.o") == (
        "/opt/musa/bin/mcc", "-mtgpu", "-O3", "-Od3", "-std=c++17", "-fPIC",
        "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DNDEBUG", "-fno-strict-aliasing", "-DUSE_MUSA",
        "-fno-signed-zeros", "-ffast-math", "-fmusa-flush-denormals-to-zero", "-fno-finite-math-only", "-mllvm",
        "-vectorize-slp=false", "--offload-arch=mp_31",
        f"-I{csrc}", f"-I{torch_musa.root}/include", "-c", f"{csrc}/sample/sample.cu", "-o", "sample.o",
    )  # fmt: skip
    assert made.link_command("sample.o", "sample.so") == (
        "/opt/musa/bin/mcc", "-shared", "sample.o", "-o", "sample.so", f"-L{torch_musa.root}/lib",
        f"-L{torch_musa.musa_root}/lib", "-L/opt/musa/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10",
        "-lmusa_python", "-lmusart",
    )  # fmt: skip


def test_ccache_comes_before_the_compiler_and_not_into_the_key(plan: MakePlan, nvcc: Any) -> None:
    made = plan(ccache="/usr/bin/ccache")
    assert made.compile_command("sample.o")[:2] == ("/usr/bin/ccache", str(nvcc.path))
    assert made.link_command("sample.o", "sample.so")[0] == str(nvcc.path)
    assert made.key == plan().key


# What of a plan is not in its key, and why two plans that differ in it have one library.
NOT_IN_THE_KEY = {
    "kernel.fallback_cost": "it is only said",
    "kernel.cuda_arch": "`arch` has what comes of it",
    "kernel.excluded": "there is no plan then",
    "toolchain.path": "a compiler that moved",
    "torch.root": "a PyTorch that moved",
    "torch.musa_root": "a torch_musa that moved",
    "torch.cuda": "it goes with the compiler, whose version counts",
    "torch.capabilities": "`arch` has what comes of them",
    "chosen.toolchain": "its flags count",
    "chosen.versions": "its flags count",
    "chosen.reason": "its flags count",
    "chosen.changes_numerics": "its flags count",
    "chosen.gate": "its flags count",
    "chosen.gate_is": "its flags count",
    "ccache": "it gives what the compiler would",
    "port.origin": "the rules count",
    "suffix": "that of the ported copy, and the port counts",
}


def _variants(item: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The item with one field changed, and the field's name, for each field of it and of what it holds."""
    for part in dataclasses.fields(item):
        name, value = f"{prefix}{part.name}", getattr(item, part.name)
        several = isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])
        if several or dataclasses.is_dataclass(value):
            for inner, changed in _variants(value[0] if several else value, f"{name}."):
                yield inner, dataclasses.replace(item, **{part.name: (changed, *value[1:]) if several else changed})
        else:
            yield name, dataclasses.replace(item, **{part.name: _changed(value)})


def _changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case "mcc":
            return "nvcc"
        case str() | None:
            return f"{value} changed"
        case tuple():
            return (*value, ("more", "of it")) if value and isinstance(value[0], tuple) else (*value, "more")
        case Version():
            return Version(f"{value.public}.1")
        case Path():
            # Of the sources: a folder without them, for where they lie does not count.
            return value / "changed"
        case _:
            return MappingProxyType({**value, "nvcc": "changed"})


def test_the_key_knows_each_field_or_there_is_a_reason(plan: MakePlan, torch_musa: TorchBuild) -> None:
    compiler = dataclasses.replace(_toolchain("mcc-5.1.0", "/opt/musa"), surroundings=("a variable",))
    made = plan(toolchain=compiler, torch=torch_musa, port=Port("torch_musa", (("cuda", "musa"),)))
    same = {name for name, changed in _variants(made) if changed.key == made.key}
    assert same == NOT_IN_THE_KEY.keys()


def test_the_key_knows_every_file_of_the_kernel(plan: MakePlan, kernel: KernelSpec, csrc: Path) -> None:
    keys = [plan().key]
    (csrc / kernel.name / "sample.cu").write_text("// changed\n")
    keys.append(plan().key)
    (csrc / kernel.name / "new.h").write_text("// included\n")
    keys.append(plan().key)
    (csrc / kernel.name / "new.h").rename(csrc / kernel.name / "newer.h")
    keys.append(plan().key)
    (csrc / "common").mkdir()
    (csrc / "common" / "newer.h").write_text("// shared\n")
    keys.append(plan().key)
    (csrc / "common" / "newer.h").write_text("// shared, and changed\n")
    keys.append(plan().key)
    assert len(set(keys)) == len(keys)
    (csrc / "another kernel").mkdir()
    (csrc / "another kernel" / "its.cu").write_text("// not included\n")
    assert plan().key == keys[-1]


def test_hosts_of_two_architectures_share_no_library(plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may share a cache folder."""
    key = plan().key
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert plan().key != key


def test_what_does_not_go_together_is_refused(plan: MakePlan, kernel: KernelSpec, torch_cuda: TorchBuild) -> None:
    excluding = dataclasses.replace(kernel, excluded=MappingProxyType({"nvcc": "it has no use for it"}))
    with pytest.raises(KernelUnavailable, match="sample is not built by nvcc: it has no use for it"):
        plan(kernel=excluding)
    with pytest.raises(KernelUnavailable, match=r"torch 2\.9\.1 is too old for the kernels; expected 2\.10"):
        plan(torch=dataclasses.replace(torch_cuda, version=Version("2.9.1")))
    with pytest.raises(KernelUnavailable, match=r"has no torch_musa, whose libmusa_python\.so"):
        plan(toolchain=_toolchain("mcc-5.1.0", "/opt/musa"), torch=dataclasses.replace(torch_cuda, cuda=None))
    with pytest.raises(KernelUnavailable, match=r"was built with CUDA 12\.8 and .*nvcc is of CUDA 13\.0\.88"):
        plan(torch=dataclasses.replace(torch_cuda, cuda="12.8"))
    # A pre-release of the first good version is good: nightly builds are named so.
    plan(torch=dataclasses.replace(torch_cuda, version=Version("2.10.0a0+git1")))
