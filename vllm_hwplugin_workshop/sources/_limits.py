# SPDX-License-Identifier: Apache-2.0
"""What is read of sources that need not mean well: regular files, and no more of anything than a vLLM can have."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path

from vllm_hwplugin.errors import HwpluginError

# vLLM's largest Python file has half a megabyte, and the index's page of all its wheels less.
LARGEST = 16 << 20

# A compressed piece this long cannot unpack to more memory than there is, by any of zip's methods.
_PIECE = 4096


class TooLarge(HwpluginError):
    """More than :data:`LARGEST` bytes."""

    def __init__(self) -> None:
        super().__init__(f"more than {LARGEST >> 20} MB")


def joined(pieces: Iterable[bytes]) -> bytes:
    """The pieces as one.

    Raises:
        TooLarge: raised as soon as it is certain.
    """
    whole = bytearray()
    for piece in pieces:
        whole += piece
        if len(whole) > LARGEST:
            raise TooLarge
    return bytes(whole)


def unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member, its check sum verified.

    The directory's word for its size is not believed: it is written by who made the archive.

    Raises:
        TooLarge: see above. Besides, whatever zipfile raises.
    """
    if archive.getinfo(name).file_size > LARGEST:
        raise TooLarge
    with archive.open(name) as member:
        return joined(iter(lambda: member.read(_PIECE), b""))


def file_bytes(path: Path) -> bytes:
    """The bytes of a regular file; a pipe in its place is not waited for.

    Raises:
        TooLarge: see above.
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(mode):
            raise OSError("not a regular file")
        return joined(iter(lambda: file.read(1 << 20), b""))
