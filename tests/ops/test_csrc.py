# SPDX-License-Identifier: Apache-2.0
"""Every kernel through the real compiler, without a GPU: it compiles, it can be loaded, and it registers itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import filelock
import platformdirs
import pytest

from vllm_hwplugin.ops.compile import toolchain, torch_build
from vllm_hwplugin.ops.compile.plan import make_plan
from vllm_hwplugin.ops.compile.spec import COMMON, HOPPER, KERNELS, KernelUnavailable, source_root

from ..conftest import cannot_run

pytest.importorskip("torch")

ENVIRON = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0"}

# Name of an operation -> the module that declares it, where that is not one of its own. Where its kernel is not there,
# other kernels serve, and nobody calls the operation.
WITHOUT_REFERENCE = {
    "paged_attention": "vllm_hwplugin.attention.paged._hopper",
    "log_draft_rows": "vllm_hwplugin.nwor.rows",
    "restore_draft_rows": "vllm_hwplugin.nwor.rows",
    "skinny_linear": "vllm_hwplugin.linear.operations",
}


def declaration(name: str) -> str:
    """The module that declares an operation."""
    return WITHOUT_REFERENCE.get(name, f"vllm_hwplugin.ops.{name}")


def test_what_a_kernel_includes_is_in_its_digest_and_what_is_common_is_shared() -> None:
    """A header of another kernel's folder would compile, and a change of it would not be noticed."""
    root = source_root()
    users = defaultdict(set)
    for name, spec in KERNELS.items():
        seen: set[Path] = set()
        waiting = [root / name / f"{name}.cu"]
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            users[path].add(name)
            for include in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
                found = [folder / include for folder in (path.parent, root) if (folder / include).is_file()]
                assert found, f"{path} includes {include}, which is in neither its folder nor {root}"
                assert found[0].relative_to(root).parts[0] in spec.folders, f"{path} includes {include}"
                waiting.append(found[0])
    common = [path for folder in (COMMON, HOPPER) for path in (root / folder).rglob("*") if path.is_file()]
    assert common
    assert {path.name: len(users[path]) for path in common if len(users[path]) < 2} == {}


def test_every_source_is_compiled() -> None:
    named = {source_root() / name / f"{name}.cu" for name in KERNELS}
    assert {path for path in source_root().rglob("*") if path.suffix in (".cu", ".cpp")} == named


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    """The kernels' libraries, built once for each text of what they come of, and kept in the user's cache."""
    try:
        compiler = toolchain.find("nvcc")
    except KernelUnavailable as error:
        cannot_run(str(error))
    torch = torch_build.installed()
    if torch.cuda is not None and torch.cuda.partition(".")[0] != str(compiler.version.major):
        pytest.skip(f"torch is of CUDA {torch.cuda} and nvcc of {compiler.version}")
    texts = [path.read_bytes() for path in sorted(Path(toolchain.__file__).parent.glob("*.py"))]
    keys = [make_plan(spec, compiler, torch, ENVIRON, source_root(), None, ahead=True).key for spec in KERNELS.values()]
    # Libraries also name the files of their sources.
    digest = hashlib.sha256(repr((source_root(), torch, texts, keys)).encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("vllm-hwplugin-tests") / f"csrc-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "vllm_hwplugin.ops.compile", str(folder)]
            done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "done").touch()
    built = {path.stem: path for path in folder.rglob("*.so")}
    assert built.keys() == KERNELS.keys()
    return built


@pytest.mark.slow
def test_two_processes_build_the_same_bytes(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Both of them here: nvcc puts the sources' times into names, and `libraries` may be of another checkout."""
    (name, *_) = libraries
    program = (
        "import pathlib, sys; from vllm_hwplugin.ops.compile import ahead, spec; "
        f"ahead.KERNELS = {{name: spec for name, spec in ahead.KERNELS.items() if name == {name!r}}}; "
        "ahead.build_all(pathlib.Path(sys.argv[1]), spec.source_root(), print)"
    )
    folders = tmp_path / "a", tmp_path / "b"
    started = [subprocess.Popen([sys.executable, "-c", program, str(folder)], env=ENVIRON) for folder in folders]
    assert [process.wait() for process in started] == [0, 0]
    one, other = ((folder / name / f"{name}.so").read_bytes() for folder in folders)
    assert one == other


@pytest.mark.slow
def test_every_kernel_takes_over_cuda_and_leaves_the_cpu(libraries: dict[str, Path]) -> None:
    """In another process: a library cannot be unloaded."""
    program = """
import importlib, json, sys, torch
for name, path, module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"hwplugin::{name}", key)
    before = has("CUDA")
    torch.ops.load_library(path)
    print(name, before, has("CUDA"), has("CPU"), has("CompositeExplicitAutograd"), has("Meta"))
"""
    asked = json.dumps([(name, str(path), declaration(name)) for name, path in libraries.items()])
    done = subprocess.run([sys.executable, "-c", program, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} False True False {name not in WITHOUT_REFERENCE} True" for name in libraries
    ]


@pytest.mark.slow
def test_no_library_needs_python_or_a_cuda_runtime_of_its_host(libraries: dict[str, Path]) -> None:
    for path in libraries.values():
        needed = path.read_bytes()
        assert b"libtorch.so\0" in needed
        assert b"libcudart.so" not in needed
        assert b"libpython" not in needed
        assert b"PyObject_" not in needed
