"""Copies are made once, checked before every load, and nothing that was tampered with is ever loaded."""

from __future__ import annotations

import importlib.util
import marshal
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from vllm_hwplugin.patching._overlay import Copy, Overlay, OverlayError, open_overlay

TEXT = "def answer():\n    return 42\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(folder))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return folder


@pytest.fixture
def overlay(cache: Path) -> Overlay:
    return open_overlay()


@pytest.fixture
def copy(overlay: Overlay) -> Copy:
    return overlay.place("vllm.v1.alpha", "vllm/v1/alpha.py", TEXT)


def load(overlay: Overlay, copy: Copy) -> int:
    overlay.prepare(copy)
    code = SourceFileLoader(copy.module, str(copy.path)).get_code(copy.module)
    names: dict[str, object] = {}
    exec(code, names)
    answer = names["answer"]
    assert callable(answer)
    value = answer()
    assert isinstance(value, int)
    return value


def pyc(copy: Copy) -> Path:
    return Path(importlib.util.cache_from_source(str(copy.path)))


def test_a_copy_lies_in_a_private_folder_that_its_content_names(overlay: Overlay, copy: Copy) -> None:
    assert copy.path.read_text() == TEXT
    assert copy.path.name == "alpha.py"
    for folder in (copy.path.parent, copy.path.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert copy.path.stat().st_mode & 0o777 == 0o600
    assert overlay.place("vllm.v1.alpha", "vllm/v1/alpha.py", TEXT) == copy
    assert overlay.place("vllm.v1.alpha", "vllm/v1/alpha.py", TEXT + "#\n").path != copy.path
    assert overlay.place("vllm.v1.beta", "vllm/v1/alpha.py", TEXT).path != copy.path


def test_a_right_copy_is_not_written_again(overlay: Overlay, copy: Copy) -> None:
    overlay.prepare(copy)
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in (copy.path, pyc(copy))]
    overlay.prepare(overlay.place(copy.module, "vllm/v1/alpha.py", TEXT))
    assert before == [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in (copy.path, pyc(copy))]


def test_a_copy_is_flushed_before_it_gets_its_name(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(Path(new).name), replace(old, new))[1])
    overlay.place("vllm.v1.alpha", "vllm/v1/alpha.py", TEXT)
    assert events == ["fsync", "alpha.py"]


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
def test_a_harmed_copy_is_rebuilt_and_never_loaded(
    overlay: Overlay, copy: Copy, harm: Callable[[Path], object]
) -> None:
    overlay.prepare(copy)
    harm(copy.path)
    assert load(overlay, copy) == 42
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
        again = open_overlay()
        assert again.base != overlay.base
        assert "chmod 700" in again.notes[0]
    else:
        with pytest.raises(OverlayError, match="chmod 700"):
            overlay.prepare(copy)


def test_a_foreign_folder_is_refused(overlay: Overlay, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(OverlayError, match="owned by user"):
        overlay.verify(copy)


def test_a_linked_folder_is_refused(overlay: Overlay, copy: Copy, tmp_path: Path) -> None:
    folder = copy.path.parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(OverlayError, match="symbolic link"):
        overlay.verify(copy)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_below_a_folder_that_others_write_to_is_passed_over(cache: Path, mode: int) -> None:
    cache.mkdir(mode=0o700)
    cache.chmod(mode)
    opened = open_overlay()
    assert opened.base != cache
    assert "can be written to by others" in opened.notes[0]
    cache.chmod(mode | 0o1000)
    assert open_overlay().base == cache


def test_a_linked_cache_is_checked_where_it_leads_to(cache: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    cache.symlink_to(shared / "mine")
    assert open_overlay().base == cache
    shared.chmod(0o777)
    assert str(shared) in open_overlay().notes[0]


def test_an_unwritable_host_gets_one_folder_a_user_then_one_a_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("in the way")
    opened = open_overlay()
    assert opened.base == tmp_path / "tmp" / f"vllm-hwplugin-{os.geteuid()}"
    assert open_overlay().base == opened.base
    (opened.base / "overlay").chmod(0o777)
    private = open_overlay()
    assert private.base.parent == tmp_path / "tmp"
    assert private.base.name.startswith("vllm-hwplugin-")
    assert len(private.notes) == 2
    assert load(private, private.place("m", "m.py", TEXT)) == 42
    (tmp_path / "tmp" / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp" / "file"))
    with pytest.raises(OverlayError, match="set VLLM_HWPLUGIN_CACHE_DIR"):
        open_overlay()


def test_a_private_temporary_folder_goes_with_the_process_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    (tmp_path / f"vllm-hwplugin-{os.geteuid()}").write_text("in the way")
    code = """
        import os
        from vllm_hwplugin.patching._overlay import open_overlay
        base = open_overlay().base
        child = os.fork()
        if not child:
            raise SystemExit
        os.waitpid(child, 0)
        assert base.is_dir(), "the child removed its parent's folder"
        print(base)
        """
    environ = os.environ | {"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environ, capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not Path(done.stdout.strip()).exists()


def test_a_read_only_cache_is_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(cache) and access(path, mode))
    opened = open_overlay()
    assert opened.base != cache
    assert "not writable" in opened.notes[0]


def test_the_loader_takes_the_byte_code(overlay: Overlay, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    overlay.prepare(copy)
    assert int.from_bytes(pyc(copy).read_bytes()[4:8], "little") == 0b11
    monkeypatch.setattr(SourceFileLoader, "source_to_code", None)
    assert load(overlay, copy) == 42


def other_code(copy: Copy) -> bytes:
    code = compile(TEXT.replace("42", "43"), str(copy.path), "exec", dont_inherit=True)
    return pyc(copy).read_bytes()[:16] + marshal.dumps(code)


BYTECODE_HARMS: dict[str, Callable[[Copy], bytes]] = {
    "another text's code under the right header": other_code,
    "one changed constant": lambda copy: pyc(copy).read_bytes().replace(marshal.dumps(42)[1:], marshal.dumps(43)[1:]),
    "torn": lambda copy: pyc(copy).read_bytes()[:60],
    "torn behind the header": lambda copy: pyc(copy).read_bytes()[:16] + bytes(80),
    "empty": lambda copy: b"",
}


@pytest.mark.parametrize("harm", BYTECODE_HARMS)
def test_altered_byte_code_is_never_loaded(overlay: Overlay, copy: Copy, harm: str) -> None:
    overlay.prepare(copy)
    good, bad = pyc(copy).read_bytes(), BYTECODE_HARMS[harm](copy)
    assert bad != good
    pyc(copy).write_bytes(bad)
    assert load(overlay, copy) == 42
    assert pyc(copy).read_bytes()[:-40][16:] != bad[:-40][16:]


def test_byte_code_that_python_wrote_by_itself_is_replaced(overlay: Overlay, copy: Copy) -> None:
    # What an ordinary import without the engine leaves: valid for as long as time and size agree.
    pyc(copy).parent.mkdir(mode=0o700)
    stamp = int(copy.path.stat().st_mtime).to_bytes(4, "little") + len(TEXT).to_bytes(4, "little")
    body = marshal.dumps(compile(TEXT.replace("42", "43"), str(copy.path), "exec"))
    pyc(copy).write_bytes(importlib.util.MAGIC_NUMBER + bytes(4) + stamp + body)
    assert load(overlay, copy) == 42


def test_altered_byte_code_that_cannot_be_replaced_is_refused(
    overlay: Overlay, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay.prepare(copy)
    pyc(copy).write_bytes(other_code(copy))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(OverlayError, match="remove it by hand"):
        overlay.prepare(copy)


def test_byte_code_under_a_cache_prefix_is_checked_too(
    overlay: Overlay, copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    overlay.prepare(copy)
    assert pyc(copy).is_relative_to(tmp_path / "prefix")
    pyc(copy).write_bytes(other_code(copy))
    assert load(overlay, copy) == 42
