# SPDX-License-Identifier: Apache-2.0
"""Where this user's cache lies, and which folders in it may be trusted.

Code is loaded from the cache, so a folder of it is trusted only if nobody but the user (and root) can change what it
holds, and no other user can put something else in its place: every folder and link on the way to it is judged, and what
is used from then on is the real path that was judged. That is decided by ownership and mode bits alone: POSIX ACLs show
up in the group bits (the mask), network file systems that lie about owners are beyond what a process can see. In a user
namespace without the host's root, what lies directly below / counts as root's, whoever it seems to belong to. Other
processes of the same user are not kept out: they could as well change the process itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from . import gates
from .errors import HwpluginError

APPLICATION = "vllm-hwplugin"

#: Can be written to in most containers whose root is read only; vLLM needs it anyway.
SHARED_MEMORY = Path("/dev/shm")

# As many as Linux follows in one path.
_LINKS = 40

#: Bytes; many times more than any text, metadata, byte code or journal that is read to its end.
LARGEST = 64 << 20

_WAY_OUT = "set VLLM_HWPLUGIN_CACHE_DIR to a folder below one of your own"
_WAY_OUT_OF_CODE = "name another folder in VLLM_HWPLUGIN_PATCHES"


class UntrustedFolder(HwpluginError):
    """A folder that someone else could write to or replace, or a cache folder that is no real folder of this user."""


def places(environ: Mapping[str, str] | None = None, notes: list[str] | None = None) -> tuple[Path, ...]:
    """The folders where a cache may lie, best first.

    The first is ``VLLM_HWPLUGIN_CACHE_DIR`` or the platform's user cache folder. The others serve hosts where the
    first is not writable, and containers where anybody may replace what lies in the folder for temporary files. Each
    is one folder for each user, not one for each process, so that a restart finds its copies again and the paths of
    compiled code (which vLLM's compile cache keys contain) stay the same.

    Args:
        notes: gets a line for each that this user or host does not have.

    Raises:
        GateError: the variable's value is no absolute path.
    """
    notes = [] if notes is None else notes
    found = []
    named = gates.read("VLLM_HWPLUGIN_CACHE_DIR", environ).path
    if named is not None:
        found.append(named)
    else:
        own = _user_cache_folder()
        if own is not None:
            found.append(own)
        else:
            notes.append(
                f"user {os.geteuid()} has no home with an absolute path, so no cache folder; set HOME or "
                "VLLM_HWPLUGIN_CACHE_DIR"
            )
    shared = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
    try:
        shared.insert(0, Path(tempfile.gettempdir()).absolute())
    except FileNotFoundError as error:
        notes.append(str(error))
    return (*found, *(folder / f"{APPLICATION}-{os.geteuid()}" for folder in shared))


def own_folder() -> Path:
    """The first place of the cache that is this user's own.

    Raises:
        UntrustedFolder: no place is.
        GateError: see :func:`places`.
    """
    notes: list[str] = []
    for place in places(notes=notes):
        try:
            return private_folder(place)
        except (UntrustedFolder, OSError) as error:
            notes.append(str(error))
    raise UntrustedFolder(f"no cache folder: {'; '.join(notes)}: {_WAY_OUT}")


def _user_cache_folder() -> Path | None:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / APPLICATION
    try:
        home = Path.home()
    except RuntimeError:
        return None
    # A relative one would be another folder in each working directory.
    return home / ".cache" / APPLICATION if home.is_absolute() else None


def private_folder(folder: Path) -> Path:
    """Create ``folder`` with mode 0700 where it is missing, and check that it can be trusted.

    Nothing is made below a folder that cannot be trusted itself.

    Args:
        folder: an absolute path; missing parents are created too, also with mode 0700.

    Returns:
        The real path, without links. Use this one: what was judged holds for it alone.

    Raises:
        UntrustedFolder: foreign owner, wider mode, a symbolic link in its place, or a folder or link on the way to it
            that others can replace.
        OSError: the folder is missing and cannot be created.
    """
    return _real(folder, make=True, judge_last=_judge_private)


def trusted_folder(folder: Path) -> Path:
    """Like :func:`private_folder`, for a folder that is only to be read: nothing is made.

    Raises:
        UntrustedFolder: see there.
        OSError: the folder is missing or cannot be reached.
    """
    return _real(folder, make=False, judge_last=_judge_private)


def check_place(folder: Path) -> bool:
    """Look whether :func:`private_folder` would give out ``folder``, so that files can be made there; nothing is made.

    Returns:
        Whether it is there.

    Raises:
        UntrustedFolder: see there.
        OSError: it cannot be reached, made or written to.
    """
    try:
        there, exists = trusted_folder(folder), True
    except FileNotFoundError:
        above = next(one for one in folder.parents if os.path.lexists(one))
        there, exists = _real(above, make=False, judge_last=None), False
    if not writable(there):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))
    return exists


def code_folder(folder: Path) -> Path:
    """The real path of a folder that holds code, and that only this user and root can change or replace.

    Unlike a folder of the cache it may belong to root, and others may read it.

    Args:
        folder: an absolute path.

    Raises:
        UntrustedFolder: it, or a folder or link on the way to it, is someone else's or can be written to by others.
        OSError: the folder is missing or cannot be reached.
    """
    return _real(folder, make=False, judge_last=_judge_code, way_out=_WAY_OUT_OF_CODE)


def read_code(path: Path) -> bytes:
    """The bytes of a file in a :func:`code_folder`, under the same conditions; it may not be a link.

    Raises:
        UntrustedFolder: see there.
        OSError: it cannot be read.
    """
    path = code_folder(path.parent) / path.name

    def judge(found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
            raise UntrustedFolder(
                f"{path} has mode {stat.filemode(found.st_mode)}; expected an ordinary file that others cannot write "
                f"to: run `chmod go-w {path}` after a look at it, or remove it"
            )
        _judge_hop(str(path), found, path, _WAY_OUT_OF_CODE)

    return read_ordinary(path, judge, os.O_NOFOLLOW)


def read_ordinary(
    path: str | Path, judge: Callable[[os.stat_result], None] = lambda found: None, flags: int = 0
) -> bytes:
    """The bytes of an ordinary file. A pipe or a device is not waited for, and no file of 64 MiB and more is read.

    Args:
        judge: gets the state of the open file that is then read; what it raises goes through.
        flags: more of those of :func:`os.open`.

    Raises:
        OSError: it cannot be opened or read, is something else, or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(descriptor)
        judge(found)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        if found.st_size >= LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _real(
    folder: Path, *, make: bool, judge_last: Callable[[str, os.stat_result], None] | None, way_out: str = _WAY_OUT
) -> Path:
    """The real path of ``folder``. Judged from the root down: who may change a folder decides what lies in it."""
    here, links = folder.anchor, 0
    _judge_hop(here, os.lstat(here), folder, way_out)
    rest = list(folder.parts[:0:-1])
    while rest:
        name = rest.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        path = os.path.join(here, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            if not make:
                raise
            # Another process may be just as far; who made it does not matter, what it is gets judged below.
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                # For all programs, where it is `~/.cache`; and a umask may have taken its user's rights away.
                os.chmod(path, 0o700)
            found = os.lstat(path)
        if not rest and judge_last is not None:
            judge_last(path, found)
        else:
            _judge_hop(path, found, folder, way_out)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = Path(os.readlink(path))
            here = target.anchor or here
            rest += [part for part in reversed(target.parts) if part != target.anchor]
        else:
            here = path
    return Path(here)


def _judge_private(path: str, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise UntrustedFolder(f"{path} is {what}; expected a real folder: remove it or set VLLM_HWPLUGIN_CACHE_DIR")
    if found.st_uid != os.geteuid():
        raise UntrustedFolder(
            f"{path} is owned by user {found.st_uid}; expected user {os.geteuid()}: "
            "remove it or set VLLM_HWPLUGIN_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        raise UntrustedFolder(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}; expected 0700: run `chmod 700 {path}` "
            "after a look at what it holds, or remove it"
        )


def _judge_code(path: str, found: os.stat_result) -> None:
    _judge_hop(path, found, Path(path), _WAY_OUT_OF_CODE)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022:
        # Sticky or not: what others add to it would be taken for a patch.
        raise UntrustedFolder(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, and others can add code to it; run "
            f"`chmod go-w {path}` after a look at what it holds"
        )


def _judge_hop(path: str, found: os.stat_result, folder: Path, way_out: str) -> None:
    where = path if path == str(folder) else f"{path}, on the way to {folder},"
    roots = path != str(folder) and _only_roots(path) and found.st_uid == _unknown_owner()
    if found.st_uid not in (0, os.geteuid()) and not roots:
        raise UntrustedFolder(
            f"{where} is owned by user {found.st_uid}; expected user {os.geteuid()} or root: {way_out}"
        )
    # A sticky folder (/tmp) lets others add entries but not replace ours; the mode of a link itself means nothing.
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX and not stat.S_ISLNK(found.st_mode):
        if found.st_uid == os.geteuid() or path == str(folder):
            mend = f"run `chmod go-w {path}`"
        else:
            mend = f"ask {'root' if found.st_uid == 0 else f'user {found.st_uid}'} to run `chmod +t {path}`"
        raise UntrustedFolder(
            f"{where} has mode {stat.S_IMODE(found.st_mode):04o} and can be written to by others; {mend} or {way_out}"
        )


def _only_roots(path: str) -> bool:
    """Whether root alone makes entries there."""
    return len(Path(path).parts) <= 2 or path == str(SHARED_MEMORY)


def _unknown_owner() -> int | None:
    """The id of all whom this user namespace does not know, among them the host's root; None where it knows all.

    Containers that an ordinary user starts, such as Apptainer's, are in such a namespace.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def writable(folder: Path) -> bool:
    """Whether this process can make files in ``folder``, asked for the user that it acts as."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def read_private(path: Path) -> bytes | None:
    """The bytes of a regular file that this user owns and nobody else can write to; None for anything else.

    What is checked is the open file that is then read; see :func:`read_ordinary`.
    """

    def judge(found: os.stat_result) -> None:
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError

    try:
        return read_ordinary(path, judge, os.O_NOFOLLOW)
    except OSError:
        # Also a disk or a server that fails: there is nothing that can be read.
        return None


def write_atomically(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Write a file so that it is, at every moment and after a crash, the old one, the new one or absent.

    The temporary file is new and private (never followed through a link); ``mode`` is what the file then has. With
    ``durable`` it is flushed to the disk before the rename, so that even a power cut cannot leave a name that leads to
    half a file.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    # O_EXCL also refuses a link.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if mode != 0o600:
                os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
