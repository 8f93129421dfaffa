# SPDX-License-Identifier: Apache-2.0
"""Where this user's cache lies, and which of its folders can be trusted.

Code is loaded from the cache. So only the user and root may be able to change a folder's content, and no other user may
be able to replace the folder: every folder and link on the way is checked, and the checked real path is used from then
on. Only owners and mode bits are checked. POSIX ACLs show in the group bits (the mask); a network file system that
reports wrong owners goes unnoticed. In a user namespace without the host's root, what lies directly below / counts as
root's. Other processes of the same user are not kept out: they could also change this process.
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

#: Writable in most containers with a read-only root; vLLM needs it too.
SHARED_MEMORY = Path("/dev/shm")

# Linux follows as many in one path.
_LINKS = 40

#: Bytes; many times the size of any text, metadata, byte code or run record.
LARGEST = 64 << 20

_WAY_OUT = "set VLLM_HWPLUGIN_CACHE_DIR to a folder that you own"
_WAY_OUT_OF_CODE = "name another folder in VLLM_HWPLUGIN_PATCHES"


class UntrustedFolder(HwpluginError):
    """A folder that another user could write to or replace, or a cache folder that is no real folder of this user."""


def places(environ: Mapping[str, str] | None = None, notes: list[str] | None = None) -> tuple[Path, ...]:
    """Return the folders where a cache may lie, best first.

    The first is ``VLLM_HWPLUGIN_CACHE_DIR`` or the platform's user cache folder. The others are for hosts where it is
    not writable, and for containers where anybody may replace temporary files. A folder is for a user, not for a
    process: a restart finds its copies, and the paths in vLLM's compile cache keys stay the same.

    Args:
        notes: gets a line for each folder that this user or host lacks.

    Raises:
        GateError: the variable's value is no absolute path.
    """
    notes = [] if notes is None else notes
    own = gates.read("VLLM_HWPLUGIN_CACHE_DIR", environ).path or _user_cache_folder()
    if own is None:
        notes.append(
            f"user {os.geteuid()} has no home with an absolute path, so no cache folder; set HOME or "
            "VLLM_HWPLUGIN_CACHE_DIR"
        )
    shared = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
    try:
        shared.insert(0, Path(tempfile.gettempdir()).absolute())
    except FileNotFoundError as error:
        notes.append(str(error))
    folders = () if own is None else (own,)
    return (*folders, *(folder / f"{APPLICATION}-{os.geteuid()}" for folder in shared))


def own_folder(*, writable_only: bool = False) -> Path:
    """Return the first place that only this user can change.

    Raises:
        UntrustedFolder: there is none.
    """
    notes: list[str] = []
    for place in places(notes=notes):
        try:
            folder = private_folder(place)
            if writable(folder) or not writable_only:
                return folder
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
    # A relative path would name another folder in each working directory.
    return home / ".cache" / APPLICATION if home.is_absolute() else None


def private_folder(folder: Path) -> Path:
    """Create ``folder`` with mode 0700 if missing; return its real path.

    Only the real path was checked. Missing parents get mode 0700, too, if what is above them can be trusted.

    Raises:
        UntrustedFolder: foreign owner, wider mode, a symbolic link, or others can replace a folder or link on the way.
        OSError: the folder is missing and cannot be created.
    """
    return _real(folder, make=True, judge_last=_judge_private)


def trusted_folder(folder: Path) -> Path:
    """Check a folder like :func:`private_folder`, without creating it."""
    return _real(folder, make=False, judge_last=_judge_private)


def check_place(folder: Path) -> bool:
    """Whether ``folder`` exists; raise if :func:`private_folder` would. Creates nothing."""
    try:
        there, exists = trusted_folder(folder), True
    except FileNotFoundError:
        above = next(parent for parent in folder.parents if os.path.lexists(parent))
        there, exists = _real(above, make=False, judge_last=None), False
    if not writable(there):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))
    return exists


def code_folder(folder: Path) -> Path:
    """Return the real path of a code folder that others cannot change.

    Unlike a folder of the cache it may belong to root, and others may read it.

    Raises:
        UntrustedFolder: another user owns or can write to it, or to a folder or link on the way.
    """
    return _real(folder, make=False, judge_last=_judge_code, way_out=_WAY_OUT_OF_CODE)


def read_code(path: Path) -> bytes:
    """Read a file, no link, of a :func:`code_folder`."""
    path = code_folder(path.parent) / path.name

    def judge(state: os.stat_result) -> None:
        if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o022:
            raise UntrustedFolder(
                f"{path} has mode {stat.filemode(state.st_mode)}; expected an ordinary file that others cannot write "
                f"to: run `chmod go-w {path}` after a look at it, or remove it"
            )
        _judge_hop(str(path), state, path, _WAY_OUT_OF_CODE)

    return read_ordinary(path, judge, os.O_NOFOLLOW)


def read_ordinary(
    path: str | Path, judge: Callable[[os.stat_result], None] = lambda state: None, flags: int = 0
) -> bytes:
    """Read an ordinary file of less than 64 MiB; no pipe.

    It does not wait for a pipe or a device. `judge` gets the state of the open file; its exceptions pass through.
    `flags` are further flags of :func:`os.open`.

    Raises:
        OSError: it cannot be opened or read, is no ordinary file, or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        state = os.fstat(descriptor)
        judge(state)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        if state.st_size >= LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _real(
    folder: Path, *, make: bool, judge_last: Callable[[str, os.stat_result], None] | None, way_out: str = _WAY_OUT
) -> Path:
    """Return the real path, checked from the root down."""
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
            state = os.lstat(path)
        except FileNotFoundError:
            if not make:
                raise
            # Another process may create it at the same time; the folder is checked below, whoever made it.
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                # A umask may have removed the user's own rights.
                os.chmod(path, 0o700)
            state = os.lstat(path)
        if not rest and judge_last is not None:
            judge_last(path, state)
        else:
            _judge_hop(path, state, folder, way_out)
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = Path(os.readlink(path))
            here = target.anchor or here
            rest += [part for part in reversed(target.parts) if part != target.anchor]
        else:
            here = path
    return Path(here)


def _judge_private(path: str, state: os.stat_result) -> None:
    if not stat.S_ISDIR(state.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(state.st_mode) else "not a folder"
        raise UntrustedFolder(f"{path} is {kind}; expected a real folder: remove it or set VLLM_HWPLUGIN_CACHE_DIR")
    if state.st_uid != os.geteuid():
        raise UntrustedFolder(
            f"{path} is owned by user {state.st_uid}; expected user {os.geteuid()}: remove it or {_WAY_OUT}"
        )
    if state.st_mode & 0o077:
        raise UntrustedFolder(
            f"{path} has mode {stat.S_IMODE(state.st_mode):04o}; expected 0700: run `chmod 700 {path}` "
            "after a look at what it holds, or remove it"
        )


def _judge_code(path: str, state: os.stat_result) -> None:
    _judge_hop(path, state, Path(path), _WAY_OUT_OF_CODE)
    if stat.S_ISDIR(state.st_mode) and state.st_mode & 0o022:
        # Even if sticky: a file that others add would be taken for a patch.
        raise UntrustedFolder(
            f"{path} has mode {stat.S_IMODE(state.st_mode):04o}, and others can add code to it; run "
            f"`chmod go-w {path}` after a look at what it holds"
        )


def _judge_hop(path: str, state: os.stat_result, folder: Path, way_out: str) -> None:
    where = path if path == str(folder) else f"{path}, on the way to {folder},"
    roots = path != str(folder) and _only_roots(path) and state.st_uid == _unknown_owner()
    if state.st_uid not in (0, os.geteuid()) and not roots:
        raise UntrustedFolder(
            f"{where} is owned by user {state.st_uid}; expected user {os.geteuid()} or root: {way_out}"
        )
    # Others may add entries to a sticky folder (/tmp), but not replace ours. A link's own mode means nothing.
    if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX and not stat.S_ISLNK(state.st_mode):
        if state.st_uid == os.geteuid() or path == str(folder):
            remedy = f"run `chmod go-w {path}`"
        else:
            remedy = f"ask {'root' if state.st_uid == 0 else f'user {state.st_uid}'} to run `chmod +t {path}`"
        raise UntrustedFolder(
            f"{where} has mode {stat.S_IMODE(state.st_mode):04o} and can be written to by others; {remedy} or {way_out}"
        )


def _only_roots(path: str) -> bool:
    """Whether only root creates entries there."""
    return len(Path(path).parts) <= 2 or path == str(SHARED_MEMORY)


def _unknown_owner() -> int | None:
    """Return this namespace's id of unknown users, or None.

    The host's root is among them. Apptainer and others start containers in such a namespace.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def writable(folder: Path) -> bool:
    """Whether this process's effective user can create files in ``folder``."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def read_private(path: Path) -> bytes | None:
    """Read a file that only this user can change, else None."""

    def judge(state: os.stat_result) -> None:
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise PermissionError

    try:
        return read_ordinary(path, judge, os.O_NOFOLLOW)
    except OSError:
        # A failing disk or server, too, leaves nothing to read.
        return None


def write_atomically(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace a file; after a crash it is old, new or absent.

    The temporary file is private and follows no link. `durable` flushes before the rename, so that even a power cut
    leaves no truncated file.
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
