# SPDX-License-Identifier: Apache-2.0
"""Building while the package is installed: kernels where that is possible, a pure Python wheel everywhere else."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from tests.test_containers import instructions
from vllm_hwplugin.ops.compile import ahead, torch_build
from vllm_hwplugin.ops.compile.spec import KERNELS, KernelSpec
from vllm_hwplugin.ops.compile.torch_build import TorchBuild

ROOT = Path(__file__).parents[3]
FOLDERS = ("vllm_hwplugin", "vllm_hwplugin_workshop", "vllm_hwplugin_lab", "patches", "csrc")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
pytestmark = pytest.mark.usefixtures("ninja")


@pytest.fixture
def build(
    monkeypatch: pytest.MonkeyPatch, kernel: KernelSpec, csrc: Path, torch_cuda: TorchBuild, nvcc: Any, tmp_path: Path
) -> Any:
    """`build_all` on the sample tree: the libraries, and what was said."""
    monkeypatch.setattr(ahead, "KERNELS", {kernel.name: kernel})

    def call(torch: TorchBuild = torch_cuda, **environ: str) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(torch_build, "installed", lambda: torch)
        said: list[str] = []
        environ = {"PATH": os.environ["PATH"], "CUDA_HOME": str(nvcc.home), **environ}
        libraries = ahead.build_all(tmp_path / "target", csrc, said.append, environ)
        return [path.relative_to(tmp_path / "target").as_posix() for path in libraries], said

    return call


def test_no_compiler_no_architecture_and_a_bad_gate_are_said(
    build: Any, torch_cuda: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = dataclasses.replace(torch_cuda, cuda=None, capabilities=())
    assert build(cpu)[1] == [
        "no kernel is built ahead of time: torch 2.13.0+cu130 is a CPU build; set TORCH_CUDA_ARCH_LIST to build for "
        "hosts with a GPU"
    ]
    assert build(cpu, TORCH_CUDA_ARCH_LIST="9.0")[0] == ["sample/sample.so"]
    (line,) = build(dataclasses.replace(torch_cuda, capabilities=()))[1]
    assert "no GPU is here to compile for and TORCH_CUDA_ARCH_LIST is not set" in line
    monkeypatch.setattr("vllm_hwplugin.ops.compile.toolchain.HOMES", {"nvcc": (("CUDA_HOME",), "/nowhere")})
    (line,) = build(CUDA_HOME="/nowhere", PATH=str(tmp_path))[1]
    assert line.startswith("no kernel is built ahead of time: no nvcc in CUDA_HOME")


def _copy_tree(tree: Path) -> None:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)


def _wheel(tmp_path: Path, **environ: str) -> tuple[Path, str]:
    tree = tmp_path / "tree"
    _copy_tree(tree)
    environ = {name: text for name, text in {**os.environ, **environ}.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-index", "."]
    done = subprocess.run(
        [*command, "-w", str(tmp_path / "out")], cwd=tree, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    return wheel, done.stdout + done.stderr


def test_a_wheel_with_kernels_is_for_this_platform_and_every_python(tmp_path: Path, nvcc: Any) -> None:
    pytest.importorskip("torch")
    if (version := torch_build.installed().cuda) is not None and not version.startswith("13."):
        pytest.skip(f"the fake compiler is of CUDA 13 and torch of {version}")
    wheel, _ = _wheel(tmp_path, CUDA_HOME=str(nvcc.home), TORCH_CUDA_ARCH_LIST="9.0")
    (tag,) = parse_wheel_filename(wheel.name)[3]
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert tag.platform != "any"
    assert tag in set(sys_tags())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
        for name in KERNELS:
            assert archive.read(f"vllm_hwplugin/ops/_prebuilt/{name}/{name}.so") == b"built\n"
            assert f"vllm_hwplugin/ops/_prebuilt/{name}/built.json" in names
    assert not (tmp_path / "tree/vllm_hwplugin/ops/_prebuilt").exists()


@pytest.mark.slow
def test_the_lines_of_the_dockerfile_install_a_wheel_with_kernels(tmp_path: Path, nvcc: Any) -> None:
    """In a fresh environment in place of the image, which has torch and vLLM."""
    pytest.importorskip("torch")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "image.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    moved = {
        "/usr/local/cuda-13.0": str(nvcc.home),
        "/src": str(tmp_path / "src"),
        "/wheels": str(tmp_path / "wheels"),
        "/var/cache/vllm-hwplugin": str(tmp_path / "cache"),
        "65534": str(os.geteuid()),
    }
    _copy_tree(tmp_path / "src")
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    for name, args in instructions():
        for old, new in moved.items():
            args = args.replace(old, new)
        if name == "ENV":
            environ.update([args.split("=")])
        elif name == "RUN":
            done = subprocess.run(["sh", "-c", args], cwd=tmp_path, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        elif args.startswith("--from=wheel"):
            (wheel,) = tmp_path.glob(str(Path(args.split()[1]).relative_to(tmp_path)))
            assert [wheel] == list(wheel.parent.iterdir())
    (package,) = site.glob("vllm_hwplugin")
    assert sorted(path.name for path in (package / ahead.PREBUILT).iterdir()) == sorted(KERNELS)
    assert list((tmp_path / "cache/overlay").iterdir())


def test_a_compiler_that_fails_makes_a_pure_wheel(tmp_path: Path, nvcc: Any) -> None:
    pytest.importorskip("torch")
    nvcc.set("broken")
    wheel, said = _wheel(tmp_path, CUDA_HOME=str(nvcc.home), TORCH_CUDA_ARCH_LIST="9.0")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "topk_softmax is not built ahead of time" in said
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_prebuilt" in name]
