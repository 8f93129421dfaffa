"""What is kept of remote wheels."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.sources._cache import Member, WheelCache, safe_member, sources_folder


def test_directory_comes_back(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "a.whl")
    members = {"vllm/a.py": Member(size=3, crc=7)}
    assert cache.members("d") is None
    cache.keep_members(members, "d")
    assert cache.members("d") == members
    assert cache.members("other") is None
    assert cache.members(None) == members


@pytest.mark.parametrize("name", ["/etc/x.py", "vllm/../../x.py", "vllm\\..\\x.py", "vllm/a\0.py"])
def test_unsafe_names(name: str) -> None:
    assert not safe_member(name)
    assert safe_member("vllm/a.py")


def test_folder_follows_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "mine"))
    assert sources_folder() == tmp_path / "mine" / "sources"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_folder_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that others may write to is passed over for the next one."""
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "open"))
    assert sources_folder() != tmp_path / "open" / "sources"
