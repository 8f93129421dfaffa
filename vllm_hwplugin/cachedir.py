# SPDX-License-Identifier: Apache-2.0
"""Where this user's cache lies, and which folders in it may be trusted.

Code is loaded from the cache, so a folder of it is trusted only if nobody but the user (and root) can change what it
holds. That is decided by ownership and mode bits alone: POSIX ACLs show up in the group bits (the mask), network file
systems that lie about owners are beyond what a process can see.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import gates

APPLICATION = "vllm-hwplugin"


class UntrustedFolder(Exception):
    """A cache folder that someone else could write to, or that is no real folder of this user."""


def places(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """The folders where a cache may lie, best first.

    The first is ``VLLM_HWPLUGIN_CACHE_DIR`` or the platform's user cache folder. The second serves hosts where the
    first is not writable: it is one folder for each user, not one for each process, so that a restart finds its copies
    again and the paths of compiled code (which vLLM's compile cache keys contain) stay the same.

    Raises:
        GateError: the variable's value is no absolute path.
    """
    first = gates.read("VLLM_HWPLUGIN_CACHE_DIR", environ).path
    if first is None:
        # Not needed where the gate is set, and not part of the standard library: hence not at the top.
        import platformdirs

        first = Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False)).absolute()
    return first, Path(tempfile.gettempdir()).absolute() / f"{APPLICATION}-{os.geteuid()}"


def private_folder(folder: Path, *, check_ancestors: bool = True) -> None:
    """Create ``folder`` with mode 0700 where it is missing, and check that it can be trusted.

    Args:
        folder: an absolute path; missing parents are created too, also with mode 0700.
        check_ancestors: False for folders inside one that this function has already accepted.

    Raises:
        UntrustedFolder: foreign owner, wider mode, a symbolic link, or an ancestor that others can write to.
        OSError: the folder is missing and cannot be created.
    """
    if not os.path.lexists(folder):
        for missing in reversed([folder, *folder.parents]):
            if not os.path.lexists(missing):
                # Another process may be just as far; who made it does not matter, what it is gets checked below.
                missing.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise UntrustedFolder(f"{folder} is {what}; expected a real folder: remove it or set VLLM_HWPLUGIN_CACHE_DIR")
    if found.st_uid != os.geteuid():
        raise UntrustedFolder(
            f"{folder} is owned by user {found.st_uid}; expected user {os.geteuid()}: "
            "remove it or set VLLM_HWPLUGIN_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        raise UntrustedFolder(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}; expected 0700: run `chmod 700 {folder}` "
            "after a look at what it holds, or remove it"
        )
    if check_ancestors:
        for ancestor in _ancestors(folder):
            _check_ancestor(ancestor, folder)


def _ancestors(folder: Path) -> Iterator[Path]:
    """The parents as written and, where links are among them, the parents of what they lead to."""
    yield from folder.parents
    resolved = folder.resolve()
    if resolved != folder:
        yield from resolved.parents


def _check_ancestor(ancestor: Path, folder: Path) -> None:
    found = ancestor.lstat()
    if found.st_uid not in (0, os.geteuid()):
        raise UntrustedFolder(
            f"{ancestor}, which holds {folder}, is owned by user {found.st_uid}; expected user {os.geteuid()} or root: "
            "set VLLM_HWPLUGIN_CACHE_DIR to a folder below one of your own"
        )
    # A sticky folder (/tmp) lets others add entries but not replace ours; the mode of a link itself means nothing.
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode):
        raise UntrustedFolder(
            f"{ancestor}, which holds {folder}, has mode {stat.S_IMODE(found.st_mode):04o} and can be written to by "
            f"others; run `chmod go-w {ancestor}` or set VLLM_HWPLUGIN_CACHE_DIR to a folder below one of your own"
        )


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file so that it is, at every moment and after a crash, the old one, the new one or absent.

    The temporary file is new and private (mode 0600, never followed through a link). With ``durable`` it is flushed to
    the disk before the rename, so that even a power cut cannot leave a name that leads to half a file.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
