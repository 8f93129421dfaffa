"""Patched modules are ordinary modules from ordinary files; every other module is left alone."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin.patching._finder import CopyFinder
from vllm_hwplugin.patching._overlay import Overlay
from vllm_hwplugin.patching._plan import patched_file

PACKAGE = "finder_sample"
ALPHA = f"{PACKAGE}.v1.alpha"
STOCK = '''\
"""Alpha."""


def answer():
    return "stock"


def fail():
    raise ValueError("stock")


class Thing:
    """A thing."""

    def method(self):
        return "stock"
'''
PATCHED = "# one line more\n" + STOCK.replace("stock", "patched")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    folder = tmp_path / "site"
    for name, text in {
        "__init__.py": "",
        "v1/__init__.py": "WHO = 'stock'\n",
        "v1/alpha.py": STOCK,
        "v1/beta.py": STOCK,
    }.items():
        path = folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def overlay(site: Path) -> Overlay:
    return Overlay()


@pytest.fixture
def loads() -> list[str]:
    return []


@pytest.fixture
def finder(site: Path, overlay: Overlay, loads: list[str]) -> CopyFinder:
    copies = {
        ALPHA: overlay.place(patched_file(f"{PACKAGE}/v1/alpha.py", ALPHA, PATCHED)),
        f"{PACKAGE}.v1": overlay.place(patched_file(f"{PACKAGE}/v1/__init__.py", f"{PACKAGE}.v1", "WHO = 'patched'\n")),
    }
    made = CopyFinder(dict.fromkeys(copies, site), copies, loads.append)
    made.put_first()
    return made


def test_file_origin_and_code_name_the_copy(finder: CopyFinder, loads: list[str]) -> None:
    module = importlib.import_module(ALPHA)
    path = str(finder.copies[ALPHA].path)
    assert module.answer() == "patched"
    assert module.__spec__ is not None
    assert module.__file__ == module.__spec__.origin == module.answer.__code__.co_filename == path
    assert module.Thing.method.__code__.co_filename == path
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__cached__ == importlib.util.cache_from_source(path)
    assert loads == [f"{PACKAGE}.v1", ALPHA]


class Wrapping:
    """What import hooks do: they ask the other finders and wrap what those found."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.busy or not name.startswith(PACKAGE):
            return None
        self.busy = True
        try:
            self.seen.append(name)
            found = importlib.util.find_spec(name)
            assert found is not None
            found.loader_state = self
            return found
        finally:
            self.busy = False


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_wraps_finders_sees_the_copy(finder: CopyFinder, first: bool) -> None:
    hook = Wrapping()
    sys.meta_path.insert(0 if first else 1, hook)
    module = importlib.import_module(ALPHA)
    assert module.answer() == "patched"
    assert hook.seen[0] == PACKAGE
    assert ALPHA in hook.seen
    # What it did to the spec stays.
    assert module.__spec__.loader_state is hook


def test_what_a_hook_finds_of_another_file_does_not_count(finder: CopyFinder, site: Path) -> None:
    class Stock:
        def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
            return PathFinder.find_spec(name, [str(site / PACKAGE / "v1")]) if name == ALPHA else None

    sys.meta_path.insert(1, Stock())
    assert importlib.import_module(ALPHA).answer() == "patched"


def test_taking_it_away_skips_no_finder_of_another_import(finder: CopyFinder) -> None:
    behind = sys.meta_path[1]
    asked = iter(sys.meta_path)
    assert next(asked) is finder
    finder.remove()
    assert next(asked) is behind


def test_putting_it_first_again_wins_over_a_later_finder(finder: CopyFinder) -> None:
    sys.meta_path.insert(0, PathFinder)
    assert importlib.import_module(ALPHA).answer() == "stock"
    del sys.modules[ALPHA]
    finder.put_first()
    finder.put_first()
    assert importlib.import_module(ALPHA).answer() == "patched"
    assert sys.meta_path.count(finder) == 1
    finder.remove()
    assert finder not in sys.meta_path


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["lstat", "open"])
def test_a_file_system_that_fails_once_ends_no_import(
    finder: CopyFinder, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    real, failures = getattr(os, call), [True, False]

    def fail(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(finder.copies[ALPHA].path.parent) in str(path) and failures and failures.pop(0):
            raise OSError(error, os.strerror(error), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fail)
    assert importlib.import_module(ALPHA).answer() == "patched"
    del sys.modules[ALPHA]
    failures[:] = [True] * 9
    if call == "lstat":
        with pytest.raises(ImportError, match=os.strerror(error)):
            importlib.import_module(ALPHA)


def test_another_tree_under_the_same_name_ends_the_import(finder: CopyFinder, tmp_path: Path) -> None:
    package = importlib.import_module(PACKAGE)
    other = tmp_path / "other" / PACKAGE / "v1"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    package.__path__ = [str(other.parent)]
    with pytest.raises(ImportError, match="start again with one finder_sample on the path"):
        importlib.import_module(f"{PACKAGE}.v1")
