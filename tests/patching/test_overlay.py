"""Copies are made once, checked before every load, and nothing that was tampered with is ever run."""

from __future__ import annotations

import errno
import importlib.util
import marshal
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base import cachedir
from vllm_hwplugin.patching._finder import CopyFinder
from vllm_hwplugin.patching._overlay import Copy, Overlay, has_copy, keep_sealed
from vllm_hwplugin.patching._plan import patched_file

TEXT = "def answer():\n    return 42\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(folder))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(cachedir, "SHARED_MEMORY", tmp_path / "shm")
    return folder


@pytest.fixture
def overlay(cache: Path) -> Overlay:
    return Overlay()


@pytest.fixture
def copy(overlay: Overlay) -> Copy:
    return overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.alpha", TEXT))


def load(copy: Copy) -> int:
    """Import it as Python does, and run it."""
    spec = CopyFinder({copy.module: Path("/nowhere")}, {copy.module: copy}).find_spec(copy.module)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = module.answer()
    assert isinstance(value, int)
    return value


def pyc(copy: Copy) -> Path:
    assert copy.bytecode is not None
    return Path(copy.bytecode)


def test_a_copy_lies_in_a_private_folder_that_its_content_names(overlay: Overlay, copy: Copy) -> None:
    assert copy.path.read_text() == TEXT
    assert copy.path.name == "alpha.py"
    for folder in (copy.path.parent, copy.path.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert copy.path.stat().st_mode & 0o777 == 0o600
    assert overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.alpha", TEXT)) == copy
    assert overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.alpha", TEXT + "#\n")).path != copy.path
    assert overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.beta", TEXT)).path != copy.path


def test_a_first_start_does_not_wait_for_the_disk(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are compared before each import, so what a power cut leaves of one is mended then."""
    monkeypatch.setattr(os, "fsync", None)
    copy = overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.alpha", TEXT))
    assert load(copy) == 42
    for torn in (b"", TEXT[:9].encode(), bytes(len(TEXT))):
        copy.path.write_bytes(torn)
        assert load(copy) == 42
        assert copy.path.read_text() == TEXT


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9])


def alter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"42", b"43"))


def widen(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"42", b"43"))
    path.chmod(0o660)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 4321, 4321)


def link(path: Path) -> None:
    other = path.parent.parent.parent / "other.py"
    other.write_text(TEXT.replace("42", "43"))
    path.unlink()
    path.symlink_to(other)


def link_to_the_same(path: Path) -> None:
    path.rename(path.parent.parent.parent / "same.py")
    path.symlink_to(path.parent.parent.parent / "same.py")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [truncate, alter, widen, give_away, link, link_to_the_same, fifo, Path.unlink])
def test_a_harmed_copy_is_rebuilt_and_never_run(copy: Copy, harm: Callable[[Path], object]) -> None:
    load(copy)
    harm(copy.path)
    assert load(copy) == 42
    assert not copy.path.is_symlink()
    assert (copy.path.read_text(), copy.path.stat().st_mode & 0o777, copy.path.stat().st_uid) == (
        TEXT,
        0o600,
        os.geteuid(),
    )


@pytest.mark.parametrize("where", ["vllm.v1.alpha", "overlay"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750])
def test_a_folder_that_is_not_private_is_refused(overlay: Overlay, copy: Copy, where: str, mode: int) -> None:
    folder = copy.path.parent if where != "overlay" else copy.path.parent.parent
    folder.chmod(mode)
    if where == "overlay":
        again = Overlay()
        assert again.base != overlay.base
        assert "chmod 700" in again.notes[0]
    else:
        with pytest.raises(ImportError, match="chmod 700"):
            load(copy)


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, nothing below the cache folder can be made, as in an image that is mounted read only."""

    def begin() -> None:
        for name in ("mkdir", "open"):
            monkeypatch.setattr(os, name, refuse(getattr(os, name)))
        access = os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode, **how: not Path(path).is_relative_to(cache) and access(path, mode, **how)
        )

    def refuse(call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, flags: int = os.O_CREAT, *more: Any, **how: Any) -> Any:
            if flags & os.O_CREAT and Path(path).is_relative_to(cache):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, flags, *more, **how)

        return refused

    return begin


def test_a_read_only_cache_serves_the_copies_that_it_has(cache: Path, read_only: Callable[[], None]) -> None:
    kept, other = (patched_file("m.py", "m", text) for text in (TEXT, TEXT.replace("42", "43")))
    Overlay().place(kept)
    assert [has_copy(file, cache) for file in (kept, other)] == [True, False]
    read_only()
    opened = Overlay()
    assert load(opened.place(kept)) == 42
    assert (opened.base, opened.notes) == (cache, [])
    # Run records are new in each process.
    assert opened.writable_base() == cache.with_name("tmp") / f"vllm-hwplugin-{os.geteuid()}"
    opened = Overlay()
    assert load(opened.place(other)) == 43
    assert opened.base == cache.with_name("tmp") / f"vllm-hwplugin-{os.geteuid()}"
    assert len(opened.notes) == 1


def test_the_loader_takes_the_byte_code(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    load(copy)
    assert int.from_bytes(pyc(copy).read_bytes()[4:8], "little") == 0b11
    monkeypatch.setattr("builtins.compile", None)
    assert load(copy) == 42


def other_code(copy: Copy) -> bytes:
    code = compile(TEXT.replace("42", "43"), str(copy.path), "exec", dont_inherit=True)
    return pyc(copy).read_bytes()[:16] + marshal.dumps(code)


def another_pythons(copy: Copy) -> bytes:
    """Whole and sealed, by a Python whose byte code has another number."""
    code = compile(TEXT.replace("42", "43"), str(copy.path), "exec", dont_inherit=True)
    keep_sealed(pyc(copy), bytes(4) + pyc(copy).read_bytes()[4:16] + marshal.dumps(code))
    return pyc(copy).read_bytes()


BYTECODE_HARMS: dict[str, Callable[[Copy], bytes]] = {
    "another text's code under the right header": other_code,
    "another Python's": another_pythons,
    "one changed constant": lambda copy: pyc(copy).read_bytes().replace(marshal.dumps(42)[1:], marshal.dumps(43)[1:]),
    "torn": lambda copy: pyc(copy).read_bytes()[:60],
}


@pytest.mark.parametrize("harm", BYTECODE_HARMS)
def test_altered_byte_code_is_never_run(copy: Copy, harm: str) -> None:
    load(copy)
    good, bad = pyc(copy).read_bytes(), BYTECODE_HARMS[harm](copy)
    assert bad != good
    pyc(copy).write_bytes(bad)
    assert load(copy) == 42
    assert pyc(copy).read_bytes()[:-40][16:] != bad[:-40][16:]


def test_byte_code_that_moved_with_its_folder_does_not_name_the_old_place(
    copy: Copy, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(copy)
    cache.rename(cache.with_name("moved"))
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(cache.with_name("moved")))
    moved = Overlay().place(patched_file("vllm/v1/alpha.py", copy.module, TEXT))
    assert pyc(moved).exists()
    assert moved.code().co_filename == str(moved.path) != str(copy.path)


def folder_that_is_a_link(target: Path) -> None:
    target.parent.symlink_to(target.parents[3])


def folder_of_others(target: Path) -> None:
    target.parent.mkdir()
    target.parent.chmod(0o777)


@pytest.mark.parametrize("harm", [folder_that_is_a_link, folder_of_others, "full disk", "prefix"])
def test_byte_code_that_cannot_be_kept_stops_nothing(
    copy: Copy, harm: Callable[[Path], None] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harm == "prefix":
        monkeypatch.setattr(sys, "pycache_prefix", os.devnull)
    elif harm == "full disk":

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "replace", full)
    else:
        assert callable(harm)
        harm(pyc(copy))
    assert load(copy) == 42
    assert load(copy) == 42


def test_a_full_disk_sends_the_copy_to_the_next_place(
    cache: Path, tmp_path: Path, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def full(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(cache):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    copy = overlay.place(patched_file("vllm/v1/alpha.py", "vllm.v1.alpha", TEXT))
    assert copy.path.is_relative_to(tmp_path / "tmp")
    assert overlay.base.parent == tmp_path / "tmp"
    assert os.strerror(errno.ENOSPC) in overlay.notes[0]
    assert load(copy) == 42
