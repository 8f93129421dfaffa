# SPDX-License-Identifier: Apache-2.0
"""Compilers are found and their versions read; what cannot be read is an error that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_hwplugin.ops.compile import toolchain
from vllm_hwplugin.ops.compile.spec import KernelUnavailable, ToolchainName

RECORDINGS = Path(__file__).parent / "recordings"


def _compiler(folder: Path, name: str) -> Path:
    path = folder / "bin" / name
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


def _recorded(argv: Sequence[str]) -> str:
    recording = {"nvcc": "nvcc-13.0", "mcc": "mcc-5.1.0"}[Path(argv[0]).name]
    return (RECORDINGS / f"{recording}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "variables"), [("nvcc", ("CUDA_HOME", "CUDA_PATH")), ("mcc", ("MUSA_HOME", "MUSA_PATH"))]
)
def test_a_home_that_is_named_comes_before_the_path(
    tmp_path: Path, name: ToolchainName, variables: tuple[str, str]
) -> None:
    first, second, third = (_compiler(tmp_path / folder, name) for folder in "abc")
    environ = {variables[0]: str(tmp_path / "a"), variables[1]: str(tmp_path / "b"), "PATH": str(third.parent)}
    found = toolchain.find(name, environ, _recorded)
    assert (found.path, found.home) == (str(first), tmp_path / "a")
    del environ[variables[0]]
    assert toolchain.find(name, environ, _recorded).path == str(second)
    environ[variables[1]] = ""
    assert toolchain.find(name, environ, _recorded).path == str(third)


def _mcc(folder: Path, version: str, header: str | None) -> dict[str, str]:
    """A toolkit whose mcc says its version as a recording has it; the environment that names it."""
    _compiler(folder, "mcc").write_text(f"#!/bin/sh\nexec cat {RECORDINGS / version}\n")
    if header is not None:
        (folder / "include").mkdir()
        (folder / "include" / "musa.h").write_text(header)
    return {"MUSA_HOME": str(folder), "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(("version", "found"), [("mcc-5.0.0.txt", "5.0.0"), ("mcc-clang.txt", "5.1.0")])
def test_an_mcc_that_does_not_say_its_version_is_of_its_toolkits(tmp_path: Path, version: str, found: str) -> None:
    header = (RECORDINGS / "musa-5.1.0.h").read_text(encoding="utf-8")
    assert str(toolchain.find("mcc", _mcc(tmp_path, version, header)).version) == found


def test_a_compiler_that_is_missing_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "HOMES", {"nvcc": (("CUDA_HOME",), str(tmp_path / "usual"))})
    with pytest.raises(KernelUnavailable, match=r"no nvcc in CUDA_HOME, .*install it, or set CUDA_HOME"):
        toolchain.find("nvcc", {"PATH": str(tmp_path)}, _recorded)
    usual = _compiler(tmp_path / "usual", "nvcc")
    assert toolchain.find("nvcc", {"PATH": str(tmp_path)}, _recorded).path == str(usual)
