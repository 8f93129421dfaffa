"""A vLLM in a wheel file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.sources import SourceError, WheelSource

WriteWheel = Callable[..., Path]


def test_members_and_version(tmp_path: Path, write_wheel: WriteWheel) -> None:
    source = WheelSource(write_wheel(tmp_path, "0.33.0+cpu", {"vllm/a.py": "x = 1\r\n"}))
    assert source.version == "0.33.0+cpu"
    assert source.label == "vllm-0.33.0+cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert source.read("vllm/a.py") == "x = 1\r\n"
    assert source.read("vllm/b.py") is None


def test_version_without_metadata(tmp_path: Path, write_wheel: WriteWheel) -> None:
    """A repacked wheel that lost its METADATA still states its version in its version module."""
    wheel = write_wheel(tmp_path, "0.33.0", {"vllm/_version.py": "__version__ = '0.32.0'\n"}, metadata=None)
    assert WheelSource(wheel).version == "0.32.0"


def test_no_version_anywhere(tmp_path: Path, write_wheel: WriteWheel) -> None:
    wheel = write_wheel(tmp_path, "0.33.0", {"vllm/__init__.py": ""}, metadata="Name: vllm\nVersion: local build\n")
    with pytest.raises(SourceError, match=r"states no version .*FOLDER@0\.33\.0$"):
        WheelSource(wheel)


def test_wheel_of_something_else(tmp_path: Path, write_wheel: WriteWheel) -> None:
    with pytest.raises(SourceError, match=r"no vllm/ package in this wheel; name a wheel of vLLM$"):
        WheelSource(write_wheel(tmp_path, "1.0", {"other/__init__.py": ""}, project="other"))


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_wheel(tmp_path: Path, write_wheel: WriteWheel, kept: float) -> None:
    wheel = write_wheel(tmp_path, "0.33.0", {"vllm/a.py": "x = 1\n" * 100})
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(
        SourceError, match=r"not a readable wheel \(.+\); name a complete \.whl file, or download it again$"
    ):
        WheelSource(wheel)


def test_damaged_member(tmp_path: Path) -> None:
    """A member whose bytes changed after packing is refused, not compared with patches."""
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("vllm/a.py", "original text\n")
        archive.writestr("vllm/_version.py", "__version__ = '0.33.0'\n")
    wheel.write_bytes(wheel.read_bytes().replace(b"original text", b"orIginal text"))
    with pytest.raises(SourceError, match=r"vllm/a\.py is damaged \(.*CRC.*\); download the wheel again$"):
        WheelSource(wheel).read("vllm/a.py")


def test_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a readable wheel"):
        WheelSource(tmp_path / "absent.whl")
