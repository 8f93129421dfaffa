"""What other users and odd hosts may do to a process that patches: nothing of theirs runs, and vLLM starts."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cpu_seconds import patience, wait_until
from vllm_hwplugin.patching._finder import CopyFinder
from vllm_hwplugin.patching._overlay import Copy, Overlay
from vllm_hwplugin.patching._plan import patched_file

from .madeup import Project

SOMEONE = 4321
NAME = "attacked_sample"
TEXT = "WHO = 'patched'\n\ndef who():\n    return 'patched'\n"
EVIL = TEXT.replace("patched", "evil")

USE = """
    import vllm.v1.alpha as alpha, vllm.v1.pack as pack
    assert (alpha.double(2), alpha.Runner().step(1), pack.name()) == (6, 11, "patched pack")
"""


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


# -- a second user at work ---------------------------------------------------------------------------------------------

VICTIM = """
    import os
    record = install()
    open({ready!r}, "w").close()
    imports = evil = 0
    while not os.path.exists({stop!r}):
        sys.modules.pop("vllm.v1.alpha", None)
        import vllm.v1.alpha as alpha
        imports += 1
        evil += hasattr(alpha, "EVIL")
    import json
    print(json.dumps([imports, evil, record.overlay, record.error, record.live]))
"""


def start_swapping(one: Path, other: Path, enough: int) -> int:
    """A process of another user that swaps two entries of a folder, and writes to `enough` after 1,000 times."""
    # He need not be let through the folders above it, which belong to the tests.
    folder = os.open(one.parent, os.O_RDONLY | os.O_DIRECTORY)
    child = os.fork()
    if child:
        os.close(folder)
        return child
    try:
        os.setgroups([])
        os.setresgid(SOMEONE, SOMEONE, SOMEONE)
        os.setresuid(SOMEONE, SOMEONE, SOMEONE)
        for times in itertools.count():
            for source, target in ((one.name, "aside"), (other.name, one.name), ("aside", other.name)):
                os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)
            if times == 1000:
                os.write(enough, b"x")
            time.sleep(0.0003)
    finally:
        os._exit(1)


def under_attack(project: Project, one: Callable[[], Path], other: Path, **environ: str) -> list[Any]:
    """Let the victim import, again and again, while another user swaps ``one()`` for ``other``."""
    ready, stop = project.folder / "ready", project.folder / "stop"
    victim = subprocess.Popen(
        project.command(VICTIM.format(ready=str(ready), stop=str(stop))),
        env=project.environ(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(ready.exists, 60, unless=lambda: victim.poll() is not None)
    worked, enough = os.pipe()
    attacker = start_swapping(one(), other, enough)
    try:
        assert select.select([worked], [], [], patience(60))[0]
        stop.touch()
        out, err = victim.communicate(timeout=patience(60))
        # It was at work to the end.
        assert os.waitpid(attacker, os.WNOHANG) == (0, 0)
    finally:
        os.kill(attacker, signal.SIGKILL)
        os.waitpid(attacker, 0)
        victim.kill()
    assert victim.returncode == 0, err
    found: list[Any] = json.loads(out)
    return found


def evil_cache(project: Project, base: Path) -> None:
    """The attacker's own cache: the names are digests of public texts, so he can foresee them."""
    made = project.folder / "made"
    project.run("install()", USE, VLLM_HWPLUGIN_CACHE_DIR=str(made))
    base.parent.mkdir(exist_ok=True)
    made.rename(base)
    for path in list(base.rglob("*.pyc")):
        path.unlink()
    for path in base.glob("overlay/*/*.py"):
        path.write_text(path.read_text() + "\nEVIL = True\n")
    for path in [base, *base.rglob("*")]:
        os.chown(path, SOMEONE, SOMEONE)


def open_up(folder: Path, mode: int = 0o755) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    return folder


def test_a_chain_of_links_that_others_can_bend_is_not_used(patched: Project) -> None:
    needs_root()
    shared = open_up(patched.folder / "shared", 0o777)
    home = open_up(patched.folder / "home")
    temporary = open_up(patched.folder / "tmp")
    (home / "real").mkdir(mode=0o700)
    evil_cache(patched, shared / "evil" / "vllm-hwplugin")
    os.chown(shared / "evil", SOMEONE, SOMEONE)
    (shared / "hop").symlink_to(home / "real")
    (shared / "bent").symlink_to(shared / "evil")
    (home / ".cache").symlink_to(shared / "hop")
    environ = {"HOME": str(home), "VLLM_HWPLUGIN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "TMPDIR": str(temporary)}
    imports, evil, overlay, error, live = under_attack(patched, lambda: shared / "hop", shared / "bent", **environ)
    assert imports > 0
    assert (evil, error, live) == (0, None, ["made-up"])
    assert overlay == str(temporary / f"vllm-hwplugin-{os.geteuid()}")


# -- odd hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/dev/null", __file__])
def test_a_prefix_for_byte_code_that_cannot_be_written_stops_nothing(patched: Project, prefix: str) -> None:
    patched.run("assert install().live", USE, PYTHONPYCACHEPREFIX=prefix)


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
