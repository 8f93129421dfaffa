# SPDX-License-Identifier: Apache-2.0
"""What a reader finds of a file while it is written anew, and after its writer met a full disk, a signal or its end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_hwplugin.base import cachedir, run_records
from vllm_hwplugin.base.cachedir import read_private, write_atomically
from vllm_hwplugin.cli.output import OutputError, write_text
from vllm_hwplugin.patching._overlay import keep_sealed, read_sealed

WATCHED = ("write", "fsync", "close", "replace", "rename", "unlink")


@pytest.mark.parametrize("planted", ["file", "link"])
def test_a_temporary_file_is_new_whoever_has_guessed_its_name(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda length: bytes(length))
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    temporary = tmp_path / f".kept.{os.getpid()}.{bytes(4).hex()}.tmp"
    if planted == "link":
        temporary.symlink_to(victim)
    else:
        temporary.write_text("of somebody else")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "kept", b"data")
    assert (victim.read_text(), temporary.read_text()) == ("of somebody else", "of somebody else")
    assert not (tmp_path / "kept").exists()


class Killed(BaseException):
    """The process ends here."""


class Disk:
    """`os` on a disk that takes a few bytes at a time and may fail, with a reader who looks before and after each call.

    Args:
        pieces: how many bytes each write takes; after the last one, all.
        failing: the call that fails, counted from 0; a close does not.
        error: what it fails with.
    """

    def __init__(self, pieces: list[int], failing: int | None, error: BaseException, look: Callable[[], None]) -> None:
        self.pieces, self.failing, self.error, self.look = list(pieces), failing, error, look
        self.calls: list[str] = []
        self.failed = self.looking = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in WATCHED or self.looking:
            return real

        def call(*arguments: Any) -> Any:
            self._look()
            if len(self.calls) == self.failing and name != "close":
                self.failed = True
                raise self.error
            self.calls.append(name)
            if name == "write" and self.pieces:
                arguments = (arguments[0], arguments[1][: self.pieces.pop(0)])
            done = real(*arguments)
            self._look()
            return done

        return call

    def _look(self) -> None:
        self.looking = True
        self.look()
        self.looking = False


class Writer(NamedTuple):
    """Who keeps something by `write_atomically`, and reads it."""

    write: Callable[[Path, bytes], None]
    read: Callable[[Path], bytes | None]
    durable: bool = False


def _note(path: Path, data: bytes) -> None:
    run_records.note("kept", data.decode())


def _noted(path: Path) -> bytes | None:
    (file,) = path.parent.glob("records/*.json")
    found = json.loads(file.read_text())["decisions"].get("kept")
    return None if found is None else found.encode()


def _unsealed(path: Path) -> bytes | None:
    found = read_sealed(path)
    return None if found is None else bytes(found)


WRITERS = {
    "file": Writer(write_atomically, read_private, durable=True),
    "sealed": Writer(keep_sealed, _unsealed),
    "results": Writer(lambda path, data: write_text(data.decode(), path), read_private),
    "record": Writer(_note, _noted),
}


@pytest.fixture(autouse=True)
def _no_record() -> Iterator[None]:
    yield
    run_records.forget()


@pytest.mark.parametrize("name", WRITERS)
@given(
    old=st.none() | st.binary(max_size=60).map(lambda data: data.hex().encode()),
    new=st.binary(max_size=60).map(lambda data: data.hex().encode()),
    pieces=st.lists(st.integers(1, 50), max_size=5),
    failing=st.none() | st.integers(0, 7),
    error=st.sampled_from([OSError(errno.ENOSPC, "full"), InterruptedError(errno.EINTR, "signal"), Killed()]),
)
def test_a_reader_sees_the_old_file_or_the_new_one(
    name: str, old: bytes | None, new: bytes, pieces: list[int], failing: int | None, error: BaseException
) -> None:
    assume(old != new)
    writer = WRITERS[name]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder).resolve() / "kept"
        run_records.begin(run_records.new("0"), path.parent)
        if old is not None:
            writer.write(path, old)

        def look() -> None:
            assert writer.read(path) in (old, new)

        disk = Disk(pieces, failing, error, look)
        patch.setattr(cachedir, "os", disk)
        with contextlib.suppress(OSError, OutputError, Killed):
            writer.write(path, new)
        patch.undo()
        assert writer.read(path) == (old if disk.failed else new)
        # A disk that is full is not filled further.
        assert not list(Path(folder).rglob("*.tmp"))
        if not disk.failed:
            # Flushed before it has its name: a power cut must not leave a name that leads to half a file.
            assert [call for call in disk.calls if call != "write"] == ["fsync"] * writer.durable + ["close", "replace"]
            assert disk.calls.index("close") >= disk.calls.count("write")
