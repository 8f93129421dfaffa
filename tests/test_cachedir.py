"""Which folders are trusted, and what is made before they are judged."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from vllm_hwplugin.base import cachedir
from vllm_hwplugin.base.cachedir import UntrustedFolder, own_folder, private_folder, trusted_folder

SOMEONE = 4321


def give_away(*paths: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    for path in paths:
        os.chown(path, SOMEONE, SOMEONE, follow_symlinks=False)


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of this user: a home, and a folder for temporary files."""
    for name in ("VLLM_HWPLUGIN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(cachedir, "SHARED_MEMORY", tmp_path / "shm")


# -- the way to a folder -----------------------------------------------------------------------------------------------


def test_missing_folders_are_made_private_and_the_real_path_is_given(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("home")
    folder = private_folder(tmp_path / "link" / ".." / "home" / "a" / "b")
    assert folder == tmp_path / "home" / "a" / "b"
    assert [part.stat().st_mode & 0o777 for part in (folder, folder.parent)] == [0o700, 0o700]
    assert private_folder(folder) == trusted_folder(folder) == folder


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_made_below_a_folder_that_others_write_to(tmp_path: Path, depth: int) -> None:
    (tmp_path / "home").chmod(0o770)
    target = (tmp_path / "home").joinpath(*"abc"[:depth])
    with pytest.raises(UntrustedFolder):
        private_folder(target)
    assert not os.listdir(tmp_path / "home")
    (tmp_path / "home").chmod(0o1770)
    assert private_folder(target) == target


def test_a_umask_does_not_shut_this_user_out_of_what_is_made(tmp_path: Path) -> None:
    """Nor other programs, where it is `~/.cache`."""
    before = os.umask(0o777)
    try:
        folder = private_folder(tmp_path / "home" / ".cache" / "own")
    finally:
        os.umask(before)
    assert [part.stat().st_mode & 0o777 for part in (folder, folder.parent)] == [0o700, 0o700]


BITS = [1 << bit for bit in range(10)]
# What has to hold of the bits of the last part, and of who owns it: this user (root is the user, where tests run as
# root), or someone else.
TRUSTED: dict[str, Callable[[int, bool], bool]] = {
    "cache folder": lambda mode, own: own and not mode & 0o077,
    "way to a cache folder": lambda mode, own: own and (not mode & 0o022 or bool(mode & 0o1000)),
    "code folder": lambda mode, own: own and not mode & 0o022,
    "way to a code folder": lambda mode, own: own and (not mode & 0o022 or bool(mode & 0o1000)),
    "cache file": lambda mode, own: own and not mode & 0o022,
    "code file": lambda mode, own: own and not mode & 0o022,
    "link to a cache file": lambda mode, own: False,
    "link to a code file": lambda mode, own: False,
}


#: Those that differ by two bits at most from one that is trusted everywhere, or from one with all bits.
MODES = sorted(
    {mode ^ one ^ other for mode in (0o700, 0o1777) for one, other in itertools.product([0, *BITS], repeat=2)}
)


@pytest.mark.parametrize("what", TRUSTED)
@pytest.mark.parametrize("own", [True, False])
def test_who_may_have_changed_it_decides_and_nothing_else(tmp_path: Path, what: str, own: bool) -> None:
    folder = private_folder(tmp_path / "home" / "judged")
    below, file, link = private_folder(folder / "below"), folder / "file", folder / "link"
    file.write_bytes(b"text")
    link.symlink_to(file)
    part = file if what.endswith("file") else folder
    ask: Callable[[], object] = {
        "cache folder": lambda: trusted_folder(folder),
        "way to a cache folder": lambda: trusted_folder(below),
        "code folder": lambda: cachedir.code_folder(folder),
        "way to a code folder": lambda: cachedir.code_folder(below),
        "cache file": lambda: cachedir.read_private(file),
        "code file": lambda: cachedir.read_code(file),
        "link to a cache file": lambda: cachedir.read_private(link),
        "link to a code file": lambda: cachedir.read_code(link),
    }[what]
    if not own:
        give_away(part)
    wrong = []
    for mode in MODES:
        if os.geteuid() and mode & 0o700 != 0o700:
            continue  # what this user cannot open is another matter; root can
        part.chmod(mode)
        try:
            found = ask() is not None
        except (UntrustedFolder, OSError):
            found = False
        if found != TRUSTED[what](mode, own):
            wrong.append(f"{mode:04o}")
    assert wrong == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [cachedir.read_private, cachedir.read_code])
def test_what_is_no_ordinary_file_or_too_large_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    folder = private_folder(tmp_path / "home" / "own")
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir(mode=0o700)
    with open(folder / "large", "wb") as file:
        file.truncate(1 << 30)
    for name in ("pipe", "folder", "large"):
        with contextlib.suppress(UntrustedFolder, OSError):
            assert read(folder / name) is None


def test_nothing_is_made_in_a_foreign_home(tmp_path: Path) -> None:
    give_away(tmp_path / "home")
    own, second = cachedir.places()
    with pytest.raises(UntrustedFolder, match=f"owned by user {SOMEONE}"):
        private_folder(own)
    assert own_folder() == second
    (tmp_path / "tmp").chmod(0o777)
    with pytest.raises(UntrustedFolder):
        own_folder()
    assert not os.listdir(tmp_path / "home")


def test_every_hop_of_a_chain_of_links_is_judged(tmp_path: Path) -> None:
    """A link in a folder of others, between two that are this user's own, decides where the path leads."""
    shared, real = tmp_path / "shared", tmp_path / "home" / "real"
    shared.mkdir(mode=0o755)
    private_folder(real)
    (shared / "hop").symlink_to(real)
    (tmp_path / "home" / ".cache").symlink_to("../shared/hop")
    assert private_folder(tmp_path / "home" / ".cache" / "deep") == real / "deep"
    shared.chmod(0o777)
    for look in (private_folder, trusted_folder):
        with pytest.raises(UntrustedFolder, match=str(shared)):
            look(tmp_path / "home" / ".cache" / "deep")


def test_a_link_of_another_user_is_refused_where_he_may_put_links(tmp_path: Path) -> None:
    """In a sticky folder nobody else can replace the entry, but its owner can."""
    (tmp_path / "tmp").chmod(0o1777)
    private_folder(tmp_path / "home" / "real")
    (tmp_path / "tmp" / "hop").symlink_to(tmp_path / "home" / "real")
    assert private_folder(tmp_path / "tmp" / "hop" / "deep")
    give_away(tmp_path / "tmp" / "hop")
    with pytest.raises(UntrustedFolder, match="hop"):
        private_folder(tmp_path / "tmp" / "hop" / "deep")


@pytest.mark.parametrize(
    ("path", "trusted"),
    [("/", True), ("/home", True), ("/home/group", False), ("/home/group/me", False), ("/me", False)],
)
def test_whom_a_user_namespace_does_not_know_is_root_where_nobody_else_makes_entries(
    path: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = 65534
    folder = Path("/me" if path == "/me" else "/home/group/me")
    owned = os.stat_result((0o40755, 0, 0, 1, unknown, unknown, 0, 0, 0, 0))
    monkeypatch.setattr(cachedir, "_unknown_owner", lambda: None)
    with pytest.raises(UntrustedFolder, match="owned by user 65534"):
        cachedir._judge_hop(path, owned, folder, "")
    monkeypatch.setattr(cachedir, "_unknown_owner", lambda: unknown)
    with contextlib.nullcontext() if trusted else pytest.raises(UntrustedFolder):
        cachedir._judge_hop(path, owned, folder, "")


# -- the places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home_has_the_second_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """A relative one would be another in each working directory."""

    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    notes: list[str] = []
    assert cachedir.places(notes=notes) == (tmp_path / "tmp" / f"vllm-hwplugin-{os.geteuid()}",)
    assert len(notes) == 1
