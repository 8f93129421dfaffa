# SPDX-License-Identifier: Apache-2.0
"""Every kernel that mcc is to build, ported by the real torchada's table, through a compiler.

By nvcc, with headers that give MUSA's names back to CUDA. That shows that the copy is C++ and leaves no name of CUDA;
it does not show what mcc makes of it. Not run on MUSA hardware.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_hwplugin.ops.compile import port, toolchain, torch_build
from vllm_hwplugin.ops.compile.port import Port, left_over
from vllm_hwplugin.ops.compile.spec import KERNELS, KernelUnavailable, source_root

from ..conftest import cannot_run
from .test_csrc import declaration

TORCHADA = "0.1.103"
BACK = Path(__file__).parent / "compile" / "musa_on_cuda"
#: What gives the current stream on MUSA, in torch_musa 2.7.1's `libmusa_python.so`.
GETTER = "aoti_torch_get_current_musa_stream"
_WEAK = re.compile(r'^extern "C" [^;{]*?\b(\w+)\([^;{]*__attribute__\(\(weak\)\);$', re.MULTILINE)
PORTED = {name: spec for name, spec in KERNELS.items() if "mcc" not in spec.excluded}

pytestmark = pytest.mark.network
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Port:
    """From a wheel if it is not installed, and in a child: torchada changes functions of torch."""
    folder = tmp_path_factory.mktemp("torchada")
    if importlib.util.find_spec("torchada") is None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), f"torchada=={TORCHADA}"]
        if (done := subprocess.run(pip, capture_output=True, text=True)).returncode != 0:
            cannot_run(f"torchada {TORCHADA} cannot be downloaded: {done.stderr[-500:]}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    child = "import json; from torchada._mappings import MAPPING_RULE; print(json.dumps(MAPPING_RULE))"
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    printed = subprocess.run([sys.executable, "-c", child], env=environ, capture_output=True, text=True, check=True)
    return port.make_port(json.loads(printed.stdout.splitlines()[-1]), f"torchada {TORCHADA}")


def test_most_kernels_are_for_musa_too() -> None:
    assert set(KERNELS) - set(PORTED) == {"paged_attention", "skinny_linear"}


@pytest.mark.parametrize("name", PORTED)
def test_no_name_of_cuda_is_left_where_musa_has_one(name: str, rules: Port, tmp_path: Path) -> None:
    for folder in KERNELS[name].folders:
        rules.tree(source_root() / folder, tmp_path / folder)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        text = path.read_text()
        assert left_over(text) == ()
        assert [old for old, new in rules.table if old in text and old not in new] == [], path.name
    assert "PrivateUse1" in "".join(path.read_text() for path in (tmp_path / name).glob("*.mu"))
    assert set(_WEAK.findall((tmp_path / "common" / "stream.h").read_text())) == {GETTER}


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTED)
def test_the_copy_compiles_and_registers_for_musa_alone(name: str, rules: Port, tmp_path: Path) -> None:
    # The front end reads all of each copy; one is made a library, because all register in the same way.
    is_library = name == "rotary_embedding"
    built = _by_nvcc(name, rules, tmp_path, is_library=is_library)
    if not is_library:
        return
    program = """
import importlib, sys, torch
name, path, module = sys.argv[1:]
importlib.import_module(module)
torch.ops.load_library(path)
print(*(torch._C._dispatch_has_kernel_for_dispatch_key(f"hwplugin::{name}", key) for key in ("CUDA", "PrivateUse1")))
"""
    command = [sys.executable, "-c", program, name, str(built), declaration(name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def _by_nvcc(name: str, rules: Port, folder: Path, *, is_library: bool) -> Path:
    try:
        compiler = toolchain.find("nvcc")
    except KernelUnavailable as error:
        pytest.skip(str(error))
    found = torch_build.installed()
    if found.cuda is not None and found.cuda.partition(".")[0] != str(compiler.version.major):
        pytest.skip(f"torch is of CUDA {found.cuda} and nvcc of {compiler.version}")
    for part in KERNELS[name].folders:
        rules.tree(source_root() / part, folder / "ported" / part)
    library = folder / f"{name}.so"
    command = [
        compiler.path, "-x", "cu", "-std=c++17", "-O0", "-Xcompiler=-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-DUSE_MUSA", "-gencode=arch=compute_90,code=sm_90", f"-I{BACK}", f"-I{folder / 'ported'}",
        f"-I{found.root / 'include'}", "-shared" if is_library else "-ptx",
        str(folder / "ported" / name / f"{name}{port.MUSA_SUFFIX}"), "-o", str(library),
        f"-L{found.root / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return library
