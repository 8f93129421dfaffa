# SPDX-License-Identifier: Apache-2.0
"""Patched modules as text that runs from memory, and as ordinary files that show it.

One patched text is one folder, ``<cache>/overlay/<module>-<hash>/``, with the ``.py`` and its ``__pycache__``. The hash
covers module and text, so a name never means two texts: other gates, another vLLM or another release of the plugin get
other folders, and any of them may be deleted at any time.

What runs is compiled from the text that this process made itself, never from a file. The file is there to be read, by
``inspect``, tracebacks, Triton and vLLM's compile cache: it is compared byte by byte before the text runs. Byte code is
only speed: it is read once, from a file that only this user can have written, and run as it was read, if a digest says
that it is whole and belongs to this very copy. The digest is no signature: it tells damage, not another process of the
same user.
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

from ..cachedir import (
    UntrustedFolder,
    places,
    private_folder,
    read_private,
    writable,
    write_atomically,
)
from ._errors import NOT_COMPILED, NotPython, PatchingError
from ._model import PatchedFile

logger = logging.getLogger("vllm.hwplugin")

#: The folder below a cache folder that holds the copies, and whose trust therefore matters.
FOLDER = "overlay"

# PEP 552: a hash-based pyc whose source is checked. An ordinary loader that comes upon it takes it for its text alone.
_CHECKED_HASH = (0b11).to_bytes(4, "little")
# Behind the byte code, which `marshal.loads` allows, stands its seal, in the same atomic write.
_MARK = b"hwplugin"
_SEAL = len(_MARK) + hashlib.sha256().digest_size


class OverlayError(PatchingError):
    """No folder, or no copy, that may be used."""


class Copy(NamedTuple):
    """The patched text of one module and where it lies."""

    module: str
    path: Path
    text: bytes

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__" + SOURCE_SUFFIXES[0]

    @property
    def bytecode(self) -> str | None:
        """Where its byte code lies; None where this Python keeps none.

        Always beside the text: PYTHONPYCACHEPREFIX keeps installed trees clean, and this is no installed tree.
        """
        if not sys.implementation.cache_tag:
            return None
        name = os.path.basename(importlib.util.cache_from_source(str(self.path)))
        return str(self.path.parent / "__pycache__" / name)

    def verify(self) -> None:
        """Make sure that the file holds exactly the text: rewrite it where it does not.

        Raises:
            OverlayError: the file is not what it should be and cannot be replaced.
        """
        try:
            private_folder(self.path.parent)
            if read_private(self.path) != self.text:
                # Not flushed to the disk, which is a tenth of what a first start adds here, and more on a slow disk:
                # what a power cut leaves of it is compared and mended here before it is imported.
                write_atomically(self.path, self.text, durable=False)
        except (OSError, UntrustedFolder) as error:
            raise OverlayError(
                f"the patched copy of {self.module} cannot be written to {self.path.parent}: {error}; "
                "make room there and make it writable, or set VLLM_HWPLUGIN_CACHE_DIR to another folder"
            ) from error

    def check(self) -> None:
        """Make sure that the text compiles, unless byte code of it shows that it did.

        Raises:
            NotPython: it does not.
        """
        if self.bytecode is None or not os.path.exists(self.bytecode):
            try:
                self.code()
            except NOT_COMPILED as error:
                raise NotPython(f"{self.path} is no Python: {error}") from error

    def code(self) -> CodeType:
        """The code of the text, from byte code that was kept or compiled now.

        The byte code is written also where PYTHONDONTWRITEBYTECODE is set, for the same reason that it lies here;
        without it every start would compile again.
        """
        target = self.bytecode
        header = importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(self.text)
        # Sealed, because CPython itself checks only the header: a torn or altered body would be run, or would end the
        # import.
        kept = read_sealed(Path(target)) if target is not None else None
        if kept is not None and kept[: len(header)] == header:
            code = marshal.loads(kept[len(header) :])
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
    """What :func:`keep_sealed` put there; None where there is nothing, or nothing that can be trusted."""
    kept = read_private(path)
    if kept is None:
        return None
    body = memoryview(kept)[:-_SEAL]
    return body if kept[len(body) :] == _seal(path, body) else None


def keep_sealed(path: Path, body: bytes) -> None:
    """Keep something for the next start; its folder is made where it is missing.

    Raises:
        UntrustedFolder: others could change what lies in the folder.
        OSError: it cannot be written.
    """
    private_folder(path.parent)
    # Not flushed to the disk: what a power cut leaves of it fails the check of its seal.
    write_atomically(path, body + _seal(path, body), durable=False)


def _seal(path: Path, body: bytes | memoryview) -> bytes:
    # With the path, which names what it was made from.
    digest = hashlib.sha256(os.fsencode(path) + b"\0")
    digest.update(body)
    return _MARK + digest.digest()


class Overlay:
    """The best place for copies that can be trusted: one that can be written to, or has been and may hold them.

    Attributes:
        base: the cache folder in use.
        notes: a line for each better place that was passed over, and why.

    Raises:
        OverlayError: there is none.
    """

    base: Path

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.notes: list[str] = []
        self._bases = _usable(environ, self.notes)
        self._take_next()

    def place(self, file: PatchedFile) -> Copy:
        """The copy of a patched file, written or verified; in the next place where this one has no room.

        Raises:
            OverlayError: it is neither there nor can it be written anywhere.
        """
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
        """Where a process can keep what is new: the one in use, or the next one where that is read only."""
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
    """Whether a cache folder that can be trusted holds the whole copy of a patched file."""
    return read_private(_copy(file, base).path) == file.data


def _usable(environ: Mapping[str, str] | None, notes: list[str]) -> Iterator[Path]:
    for place in places(environ, notes):
        try:
            folder = private_folder(place / FOLDER)
        except (OSError, UntrustedFolder) as error:
            notes.append(str(error))
        else:
            # Not writable either: a container's image can have copies, and one that is missing leads to the next place.
            yield folder.parent
