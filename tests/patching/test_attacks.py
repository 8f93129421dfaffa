"""What other users and odd hosts may do to a process that patches: nothing of theirs runs, and vLLM starts."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import marshal
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin.patching._finder import CopyFinder
from vllm_hwplugin.patching._overlay import Copy, Overlay
from vllm_hwplugin.patching._plan import patched_file

from .madeup import Project

SOMEONE = 4321
NAME = "attacked_sample"
TEXT = "WHO = 'patched'\n\ndef who():\n    return 'patched'\n"
EVIL = TEXT.replace("patched", "evil")


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as a second user")


# -- what is verified is what runs -------------------------------------------------------------------------------------


class Swapping:
    """A finder that lets the engine check its copy, and then does harm before Python loads what was found."""

    def __init__(self, finder: CopyFinder, harm: Callable[[Copy], None]) -> None:
        self._finder = finder
        self._harm = harm

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = self._finder.find_spec(name, path, target)
        if spec is not None:
            self._harm(self._finder.copies[name])
        return spec


def swap_text(copy: Copy) -> None:
    copy.path.write_text(EVIL)


def swap_folder(copy: Copy) -> None:
    copy.path.parent.rename(copy.path.parent.with_name("aside"))
    copy.path.parent.mkdir(mode=0o700)
    copy.path.write_text(EVIL)


def swap_with_byte_code(copy: Copy) -> None:
    """A whole folder as the attacker would make it: every digest is right, only he cannot make it look like ours."""
    swap_folder(copy)
    assert copy.bytecode is not None
    target = Path(copy.bytecode)
    target.parent.mkdir(mode=0o755)
    flags = (0b11).to_bytes(4, "little")
    code = marshal.dumps(compile(EVIL, str(copy.path), "exec"))
    body = importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(copy.text) + code
    target.write_bytes(body + b"hwplugin" + hashlib.sha256(os.fsencode(copy.path) + b"\0" + body).digest())
    for path in (copy.path.parent, copy.path, target.parent, target):
        os.chown(path, SOMEONE, SOMEONE)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield Overlay().place(patched_file(f"{NAME}.py", NAME, TEXT))
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("kept", [True, False], ids=["byte code is kept", "no byte code yet"])
@pytest.mark.parametrize("harm", [swap_text, swap_folder, swap_with_byte_code])
def test_what_is_swapped_in_after_the_check_does_not_run(
    copy: Copy, tmp_path: Path, kept: bool, harm: Callable[[Copy], None]
) -> None:
    if harm is swap_with_byte_code:
        needs_root()
    if kept:
        copy.code()
    sys.meta_path.insert(0, Swapping(CopyFinder({NAME: tmp_path}, {NAME: copy}), harm))
    module: Any = importlib.import_module(NAME)
    assert (module.WHO, module.who()) == ("patched", "patched")
    assert module.__file__ == module.who.__code__.co_filename == str(copy.path)
    assert module.__loader__.get_source(NAME) == TEXT


# -- odd hosts ---------------------------------------------------------------------------------------------------------


def beside(project: Project, kind: str) -> str:
    """Put something beside the module that Python prefers to it; returns what it is."""
    module = project.site / "vllm" / "v1" / "alpha.py"
    if kind == "package":
        other = project.write("vllm/v1/alpha/__init__.py", module.read_text() + "KIND = 'package'\n")
    else:
        other = module.with_suffix(EXTENSION_SUFFIXES[0])
        # Any extension that Python can load: what counts is which file the import takes.
        shutil.copy(importlib.import_module("_json").__file__ or "", other)
    return str(other)


@pytest.mark.parametrize("kind", ["package", "extension"])
def test_a_module_that_python_imports_from_another_file_is_not_patched(patched: Project, kind: str) -> None:
    if kind == "extension" and getattr(importlib.import_module("_json"), "__file__", None) is None:
        pytest.skip("this Python has no extension module as a file")
    other = beside(patched, kind)
    code = f"""
        record = install()
        reason = record.features["made-up"]["reason"]
        assert record.live == () and "vllm.v1.alpha is imported from " + {other!r} in reason, record
        import importlib.util, vllm.v1.pack as pack
        assert importlib.util.find_spec("vllm.v1.alpha").origin == {other!r}
        assert pack.name() == "stock pack"
        """
    patched.run(code)
