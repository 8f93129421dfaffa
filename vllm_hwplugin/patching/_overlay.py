# SPDX-License-Identifier: Apache-2.0
"""Patched modules as ordinary files: content-addressed copies in a folder that only the user can write to.

One patched text is one folder, ``<cache>/overlay/<module>-<hash>/``, with the ``.py`` and its ``__pycache__``. The hash
covers module and text, so a name never means two texts: other gates, another vLLM or another release of the plugin get
other folders, and any of them may be deleted at any time. Nothing here trusts what it finds: the text is compared byte
by byte before every load, and byte code must carry a digest of itself.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import marshal
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from ..cachedir import UntrustedFolder, places, private_folder, write_atomically
from ._errors import PatchingError

#: The folder below a cache folder from which code is loaded, and whose trust therefore matters.
FOLDER = "overlay"

# PEP 552: a hash-based pyc whose source is checked, so one that belongs to another text can never win.
_CHECKED_HASH = (0b11).to_bytes(4, "little")

# `marshal.loads` ignores what follows the object, so a digest of the whole file fits behind it, in the same atomic
# write. CPython itself checks only the header: a torn or altered body would be run, or would end the import.
_SEAL = b"hwplugin"


class OverlayError(PatchingError):
    """No folder, or no copy, that may be loaded from."""


class Copy(NamedTuple):
    """The patched text of one module and where it lies."""

    module: str
    path: Path
    text: bytes

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__" + SOURCE_SUFFIXES[0]


class Overlay(NamedTuple):
    """A trusted folder for copies; ``notes`` says which better places were passed over, and why."""

    base: Path
    notes: tuple[str, ...] = ()

    def place(self, module: str, path: str, text: str) -> Copy:
        """The copy of ``text`` for ``module``, written or verified.

        Args:
            module: dotted name.
            path: the module's path as diffs name it; its last part becomes the name of the copy.
            text: the patched text.

        Raises:
            OverlayError: it is neither there nor can it be written.
        """
        data = text.encode("utf-8")
        key = hashlib.sha256(module.encode("utf-8") + b"\0" + data).hexdigest()[:20]
        name = path.rpartition("/")[2]
        copy = Copy(module, self.base / FOLDER / f"{module}-{key}" / name, data)
        self.verify(copy)
        return copy

    def verify(self, copy: Copy) -> None:
        """Make sure that the file holds exactly the text: rewrite it where it does not.

        Raises:
            OverlayError: the file is not what it should be and cannot be replaced.
        """
        try:
            private_folder(copy.path.parent, check_ancestors=False)
            if _read_own(copy.path) != copy.text:
                write_atomically(copy.path, copy.text)
        except (OSError, UntrustedFolder) as error:
            raise OverlayError(
                f"the patched copy of {copy.module} cannot be written to {copy.path.parent}: {error}; "
                "make the folder writable, or set VLLM_HWPLUGIN_CACHE_DIR to another"
            ) from error

    def prepare(self, copy: Copy) -> None:
        """Verify the text and leave byte code beside it that the ordinary source loader may take.

        The byte code is written also where PYTHONDONTWRITEBYTECODE is set: that switch keeps installed trees clean, and
        this is no installed tree but a cache, without which every start would compile again.

        Raises:
            OverlayError: the text cannot be provided, or byte code that cannot be trusted cannot be removed.
        """
        self.verify(copy)
        target = Path(importlib.util.cache_from_source(str(copy.path)))
        source_hash = importlib.util.source_hash(copy.text)
        if _sealed(_read_own(target), source_hash):
            return
        try:
            _write_bytecode(copy, target, source_hash, inside=target.is_relative_to(self.base))
        except (OSError, UntrustedFolder):
            # Byte code is only speed: without it the loader compiles. But what is there must not be loaded.
            try:
                target.unlink(missing_ok=True)
            except OSError as error:
                raise OverlayError(
                    f"the byte code {target} was altered and cannot be removed: {error}; remove it by hand"
                ) from error


def open_overlay(environ: Mapping[str, str] | None = None) -> Overlay:
    """The best place for copies that can be trusted and written to.

    Raises:
        OverlayError: there is none, not even a private temporary folder.
    """
    notes: list[str] = []
    for base in places(environ):
        try:
            private_folder(base / FOLDER)
            if os.access(base / FOLDER, os.W_OK | os.X_OK):
                return Overlay(base, tuple(notes))
            notes.append(f"{base / FOLDER} is not writable; set VLLM_HWPLUGIN_CACHE_DIR to a folder that is")
        except (OSError, UntrustedFolder) as error:
            notes.append(str(error))
    try:
        # mkdtemp makes the folder, new and private: whoever owns the folders above it gets no say.
        base = Path(tempfile.mkdtemp(prefix="vllm-hwplugin-"))
        private_folder(base / FOLDER, check_ancestors=False)
    except OSError as error:
        raise OverlayError(
            f"no folder for patched copies: {'; '.join([*notes, str(error)])}: "
            "set VLLM_HWPLUGIN_CACHE_DIR to a writable folder of your own"
        ) from error
    atexit.register(_remove_tree, base, os.getpid())
    return Overlay(base, tuple(notes))


def _remove_tree(base: Path, owner: int) -> None:
    # Forked children inherit the exit handler; the folder is still their parent's.
    if os.getpid() == owner:
        shutil.rmtree(base, ignore_errors=True)


def _read_own(path: Path) -> bytes | None:
    """The bytes of a regular file that this user owns and nobody else can write to; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return None
        return file.read()


def _sealed(data: bytes | None, source_hash: bytes) -> bool:
    if data is None or data[:16] != importlib.util.MAGIC_NUMBER + _CHECKED_HASH + source_hash:
        return False
    body, seal = data[: -len(_SEAL) - 32], data[-len(_SEAL) - 32 :]
    return seal == _SEAL + hashlib.sha256(body).digest()


def _write_bytecode(copy: Copy, target: Path, source_hash: bytes, *, inside: bool) -> None:
    if inside:
        private_folder(target.parent, check_ancestors=False)
    else:
        # PYTHONPYCACHEPREFIX moves all byte code of this user; its folders are as the user wants them.
        target.parent.mkdir(parents=True, exist_ok=True)
    code = compile(copy.text, str(copy.path), "exec", dont_inherit=True)
    body = importlib.util.MAGIC_NUMBER + _CHECKED_HASH + source_hash + marshal.dumps(code)
    # Not flushed to the disk: what a power cut leaves of it fails the check of its seal.
    write_atomically(target, body + _SEAL + hashlib.sha256(body).digest(), durable=False)
