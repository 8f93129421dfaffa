"""Several commands that write one catalogue at once, and commands that are killed while they write."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin.patching import outside
from vllm_hwplugin.patching.texts import CatalogueError, Source
from vllm_hwplugin_workshop.authoring import (
    About,
    Carried,
    carry,
    create,
    extend,
    put_back,
    read_change,
    read_feature,
    written,
)

from .made import PATH, Memory, git_diff

TEXT = "".join(f"line {number}\n" for number in range(40))
ABOUT = About("it", "it", "a test", "never")
fork = multiprocessing.get_context("fork")


def carried(version: str, line: int = 20) -> Carried:
    """A change of one line, on a version."""
    source: Source = Memory(version, {PATH: TEXT})
    changed = TEXT.replace(f"line {line}\n", f"changed in {version}\n")
    return carry(read_change(git_diff(TEXT, changed), "a.diff"), source)


@pytest.fixture
def feature(tmp_path: Path) -> Path:
    (tmp_path / "catalogue.toml").write_text('name = "mine"\n')
    create(tmp_path / "it", ABOUT, written([carried("0.30.0")]))
    return tmp_path / "it"


def _extend(folder: Path, version: str) -> None:
    extend(folder, [carried(version)])


def test_writers_of_one_feature_wait_for_one_another(feature: Path) -> None:
    """Each has its version in it then, and nobody meets half a feature."""
    before = read_feature(feature)
    versions = ["0.31.0", "0.32.0", "0.33.0"]
    writers = [fork.Process(target=_extend, args=(feature, version)) for version in versions]
    held = os.open(feature.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    for writer in writers:
        writer.start()
    writers[0].join(1)
    assert read_feature(feature) == before
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)
    for writer in writers:
        writer.join(patience(60))
    assert [writer.exitcode for writer in writers] == [0] * 3
    assert all(read_feature(feature).versions.covers(version) for version in versions)
    assert sorted(os.listdir(feature.parent)) == ["catalogue.toml", "it"]


def _die_at_the_rename(folder: Path, number: int) -> None:
    rename, done = Path.rename, 0

    def killed(self: Path, target: Path) -> Path:
        nonlocal done
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = killed  # type: ignore[method-assign]
    _extend(folder, "0.33.0")


@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_writer_loses_nothing_and_hides_nothing(feature: Path, number: int) -> None:
    before = read_feature(feature)
    child = fork.Process(target=_die_at_the_rename, args=(feature, number))
    child.start()
    child.join(patience(60))
    assert child.exitcode == -signal.SIGKILL
    if number == 2:
        # A starting process runs no catalogue of which it would miss a feature.
        assert not feature.exists()
        with pytest.raises(CatalogueError, match="a command was stopped while it wrote it; rename it to"):
            outside.load_outside(feature.parent)
        assert put_back(feature.parent) == ["it"]
    assert put_back(feature.parent) == []
    assert read_feature(feature) == before
    assert sorted(os.listdir(feature.parent)) == ["catalogue.toml", "it"]
    _extend(feature, "0.33.0")
    assert read_feature(feature).versions.covers("0.33.0")
