# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ made into MUSA's: the text, the copy, and the build from it. No MUSA compiler is needed or used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin.ops.compile import jit, port
from vllm_hwplugin.ops.compile.plan import BuildPlan
from vllm_hwplugin.ops.compile.port import Port
from vllm_hwplugin.ops.compile.spec import KernelSpec, KernelUnavailable
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

MakePlan = Callable[..., BuildPlan]

TABLE = {"cuda_fp16.h": "musa_fp16.h", "cudaStream_t": "musaStream_t", "cudaStream": "musaStream", "cuda.h": "musa.h"}


RULES = {**TABLE, "asm volatile": "if(0) asm volatile", "same": "same"}


@pytest.fixture
def rules() -> Port:
    return port.make_port(RULES, "torchada 9")


def test_the_longest_rule_comes_first(rules: Port) -> None:
    # A rule that changes nothing, and the one that compiles instructions away, are left out.
    assert [old for old, _ in rules.table] == ["cudaStream_t", "cuda_fp16.h", "cudaStream", '"cuda.h"', "<cuda.h>"]


def test_the_installed_torchada_is_asked(rules: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    torchada, mappings = ModuleType("torchada"), ModuleType("torchada._mappings")
    monkeypatch.setitem(sys.modules, "torchada", torchada)
    monkeypatch.setitem(sys.modules, "torchada._mappings", mappings)
    vars(torchada)["__version__"] = "9"
    with pytest.raises(KernelUnavailable, match=r"torchada's table of names cannot be read .*MAPPING_RULE"):
        port.port_for("mcc")
    vars(mappings)["MAPPING_RULE"] = RULES
    assert port.port_for("mcc") == rules
    assert port.port_for("nvcc") is None


def test_without_torchada_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchada", None)
    assert port.port_for("nvcc") is None
    with pytest.raises(KernelUnavailable, match="install torchada"):
        port.port_for("mcc")


@pytest.mark.parametrize(
    ("source", "ported"),
    [
        ("#include <cuda_fp16.h>", "#include <musa_fp16.h>"),
        ("#include <cuda.h>\n#include <my_cuda.h>", "#include <musa.h>\n#include <my_cuda.h>"),
        ("cudaStream_t s; cudaStream t;", "musaStream_t s; musaStream t;"),
        ("STABLE_TORCH_LIBRARY_IMPL(a, CUDA, m)", "STABLE_TORCH_LIBRARY_IMPL(a, PrivateUse1, m)"),
        ("STABLE_TORCH_LIBRARY_IMPL(\n    a,\n    CUDA, m)", "STABLE_TORCH_LIBRARY_IMPL(\n    a,\n    PrivateUse1, m)"),
        ("STABLE_TORCH_LIBRARY_IMPL(a, CPU, m)", "STABLE_TORCH_LIBRARY_IMPL(a, CPU, m)"),
        ("if (!x.is_cuda())", "if (!(x.device().type() == torch::headeronly::DeviceType::PrivateUse1))"),
        ("#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800", "#if 1 && 0 >= 800"),
        ("#if __CUDA_ARCH__ < 900", "#if 0 < 900"),
        ('f("x is not on a CUDA device, cuda:", CUDA)', 'f("x is not on a MUSA device, musa:", CUDA)'),
        (r'f("\"CUDA\"")', r'f("\"MUSA\"")'),
    ],
)
def test_the_text(rules: Port, source: str, ported: str) -> None:
    assert rules.text(source) == ported
    assert rules.text(ported) == ported


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_copy_is_ported_and_the_source_stays(rules: Port, tmp_path: Path) -> None:
    folder = tmp_path / "kernel"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.cu").write_text("cudaStream_t s;\n")
    (folder / "inner" / "b.cuh").write_text("#include <cuda_fp16.h>\n")
    (folder / "notes.txt").write_text("cudaStream_t\n")
    before = texts(folder)
    rules.tree(folder, tmp_path / "copy")
    assert texts(folder) == before
    assert texts(tmp_path / "copy") == {
        "a.mu": "musaStream_t s;\n",
        "inner/b.cuh": "#include <musa_fp16.h>\n",
        "notes.txt": "cudaStream_t\n",
    }


def test_a_name_without_a_rule_is_refused(rules: Port, tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "a.cu").write_text("cudaMalloc(&p);\n")
    (tmp_path / "kernel" / "b.cuh").write_text('asm("");\n')
    words = "kernel cannot be ported to MUSA: torchada 9 has no name for cudaMalloc in a.cu, asm in b.cuh"
    with pytest.raises(KernelUnavailable, match=words):
        rules.tree(tmp_path / "kernel", tmp_path / "copy")


@pytest.fixture
def musa(nvcc: Any, torch_musa: TorchBuild, monkeypatch: pytest.MonkeyPatch, rules: Port) -> TorchBuild:
    """A PyTorch for MUSA beside a compiler that says it is mcc."""
    mcc = nvcc.path.with_name("mcc")
    mcc.write_text(nvcc.path.read_text().replace("Cuda compilation tools, release 13.0, V13.0.88", "mcc version 5.1.0"))
    mcc.chmod(0o755)
    monkeypatch.setenv("MUSA_HOME", str(nvcc.home))
    monkeypatch.setattr(port, "installed_rules", lambda: rules)
    return torch_musa


@pytest.mark.usefixtures("ninja")
def test_mcc_builds_from_the_copy(own_cache: Path, kernel: KernelSpec, musa: TorchBuild, nvcc: Any, csrc: Path) -> None:
    before = texts(csrc)
    library = jit.provide(kernel, musa)
    assert texts(csrc) == before
    compiled = [line for line in nvcc.calls if " -c " in line]
    copy = library.parent / "building" / "ported"
    assert [line.partition(" -c ")[2].split(" -o ")[0] for line in compiled] == [str(copy / "sample" / "sample.mu")]
    assert all(f" -I{copy} " in line for line in compiled)
    assert json.loads((library.parent / "built.json").read_text())["port"] == "torchada 9"
    assert not copy.exists()
    assert jit.provide(kernel, musa) == library
    assert len(nvcc.calls) == 2
