# SPDX-License-Identifier: Apache-2.0
"""What a start keeps in the cache so that the next one need not make it again: trusted whole, or made anew.

It is read once, from a file that only this user can have written, and used as it was read if a digest behind it says
that it is whole and belongs to this very place. The digest is no signature: it tells damage, not another process of the
same user.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..cachedir import private_folder, read_private, write_atomically

# `marshal.loads` ignores what follows the object, so for byte code too the digest can stand behind it, in the same
# atomic write.
_MARK = b"hwplugin"
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def read_sealed(path: Path) -> memoryview | None:
    """What :func:`keep_sealed` put there; None where there is nothing, or nothing that can be trusted."""
    kept = read_private(path)
    if kept is None:
        return None
    body = memoryview(kept)[:-_LENGTH]
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
