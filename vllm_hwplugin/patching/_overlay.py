# SPDX-License-Identifier: Apache-2.0
"""Copies of patched modules: text that runs from memory, and ordinary files that show it.

Each patched text has a folder, ``<cache>/overlay/<module>-<hash>/``, with the ``.py`` and its ``__pycache__``. The hash
covers module and text, so a name never means two texts: other switches, another vLLM or another release of the plugin
get other folders. Any folder may be deleted at any time.

A process compiles the text that it made itself, never a file. The file is for ``inspect``, tracebacks, Triton and
vLLM's compile cache; it is compared byte by byte before the text runs. Byte code only saves time: it is read once, from
a file that only this user can have written, and run if its digest shows that it is whole and belongs to this copy. The
digest is no signature: it detects damage, not another process of the same user.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import marshal
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from ..base.cachedir import UntrustedFolder, places, private_folder, read_private, writable, write_atomically
from ._errors import NOT_COMPILED, NotPython, PatchingError
from ._model import PatchedFile

logger = logging.getLogger("vllm.hwplugin")

#: The folder below a cache folder that holds the copies, and that must therefore be trusted.
FOLDER = "overlay"

# PEP 552: a hash-based pyc whose source is checked. An ordinary loader accepts it for its own text only.
_CHECKED_HASH = (0b11).to_bytes(4, "little")
# The seal follows the byte code, which `marshal.loads` allows, in the same atomic write.
_MARK = b"hwplugin"
_SEAL = len(_MARK) + hashlib.sha256().digest_size


class OverlayError(PatchingError):
    """No folder or no copy can be used."""


class Copy(NamedTuple):
    """A module's patched text and the path of its copy."""

    module: str
    path: Path
    text: bytes

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__" + SOURCE_SUFFIXES[0]

    @property
    def bytecode(self) -> str | None:
        """The path of its byte code; None if this Python keeps none.

        Always next to the text: PYTHONPYCACHEPREFIX keeps installed trees clean, and this is no installed tree.
        """
        if not sys.implementation.cache_tag:
            return None
        name = os.path.basename(importlib.util.cache_from_source(str(self.path)))
        return str(self.path.parent / "__pycache__" / name)

    def verify(self) -> None:
        """Rewrite the file if it differs, or raise OverlayError."""
        try:
            private_folder(self.path.parent)
            if read_private(self.path) != self.text:
                # Not flushed to the disk, which saves a tenth of a first start's time here, and more on a slow disk:
                # after a power cut this comparison rewrites a damaged file before it is imported.
                write_atomically(self.path, self.text, durable=False)
        except (OSError, UntrustedFolder) as error:
            raise OverlayError(
                f"the patched copy of {self.module} cannot be written to {self.path.parent}: {error}; "
                "free some space there and make it writable, or set VLLM_HWPLUGIN_CACHE_DIR to another folder"
            ) from error

    def check(self) -> None:
        """Compile the text unless byte code exists, or raise NotPython."""
        if self.bytecode is None or not os.path.exists(self.bytecode):
            try:
                self.code()
            except NOT_COMPILED as error:
                raise NotPython(f"{self.path} is no Python: {error}") from error

    def code(self) -> CodeType:
        """Return the text's code, from stored byte code or compiled now.

        The byte code is written also if PYTHONDONTWRITEBYTECODE is set, because this is no installed tree. Without it
        every start would compile again.
        """
        target = self.bytecode
        header = importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(self.text)
        # Sealed, because CPython checks only the header: a torn or altered body would run or fail the import.
        stored = read_sealed(Path(target)) if target is not None else None
        if stored is not None and stored[: len(header)] == header:
            code = marshal.loads(stored[len(header) :])
            assert isinstance(code, CodeType)
            return code
        code = compile(self.text, str(self.path), "exec", dont_inherit=True)
        if target is not None:
            try:
                keep_sealed(Path(target), header + marshal.dumps(code))
            except (OSError, UntrustedFolder) as error:
                logger.debug("the byte code of %s is not kept, each start compiles it: %s", self.module, error)
        return code


def read_sealed(path: Path) -> memoryview | None:
    """Return what :func:`keep_sealed` wrote, or None if missing or untrusted."""
    data = read_private(path)
    if data is None:
        return None
    body = memoryview(data)[:-_SEAL]
    return body if data[len(body) :] == _seal(path, body) else None


def keep_sealed(path: Path, body: bytes) -> None:
    """Write `body` with its seal, and make the folder if missing.

    Raises UntrustedFolder if other users could change files in the folder, and OSError.
    """
    private_folder(path.parent)
    # Not flushed to the disk: a file that a power cut has damaged fails the check of its seal.
    write_atomically(path, body + _seal(path, body), durable=False)


def _seal(path: Path, body: bytes | memoryview) -> bytes:
    # With the path, which names the text that the body was made from.
    digest = hashlib.sha256(os.fsencode(path) + b"\0")
    digest.update(body)
    return _MARK + digest.digest()


class Overlay:
    """The best trusted cache folder: writable, or read only with possible copies; else OverlayError.

    Attributes:
        base: the current cache folder.
        notes: a line for each better folder that was skipped, with the reason.
    """

    base: Path

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.notes: list[str] = []
        self._bases = _usable(environ, self.notes)
        self._take_next()

    def place(self, file: PatchedFile) -> Copy:
        """Verify or write a file's copy in a folder, or raise OverlayError."""
        while True:
            copy = _copy(file, self.base)
            try:
                copy.verify()
            except OverlayError as error:
                self.notes.append(str(error))
                self._take_next()
            else:
                return copy

    def writable_base(self) -> Path | None:
        """Return the current or next writable cache folder, or None."""
        return next((base for base in itertools.chain([self.base], self._bases) if writable(base)), None)

    def _take_next(self) -> None:
        base = next(self._bases, None)
        if base is None:
            raise OverlayError(
                f"no folder for patched copies: {'; '.join(self.notes)}: "
                "set VLLM_HWPLUGIN_CACHE_DIR to a writable folder of your own"
            )
        self.base = base


def _copy(file: PatchedFile, base: Path) -> Copy:
    folder, name = f"{file.module}-{file.digest[:20]}", file.path.rpartition("/")[2]
    return Copy(file.module, base / FOLDER / folder / name, file.data)


def has_copy(file: PatchedFile, base: Path) -> bool:
    """Whether a trusted cache folder holds a patched file's whole copy."""
    return read_private(_copy(file, base).path) == file.data


def _usable(environ: Mapping[str, str] | None, notes: list[str]) -> Iterator[Path]:
    for place in places(environ, notes):
        try:
            folder = private_folder(place / FOLDER)
        except (OSError, UntrustedFolder) as error:
            notes.append(str(error))
        else:
            # Also if read only: a container's image can have copies, and a missing copy leads to the next folder.
            yield folder.parent
