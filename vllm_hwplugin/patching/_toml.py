# SPDX-License-Identifier: Apache-2.0
"""The values of TOML files: parsed, or as an earlier process parsed the same bytes.

Parsing the catalogue, and importing what parses it, would be a fourth of what the plugin adds to a process's start.
What is kept is what the parser made and nothing else: every check of a `patch.toml` is done again in each process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .. import __version__
from ..cachedir import UntrustedFolder, trusted_folder
from ._errors import CatalogueError
from ._sealed import keep_sealed, read_sealed

logger = logging.getLogger("vllm.hwplugin")

#: The folder below a cache folder that holds parsed catalogues.
FOLDER: Final = "catalogue"

# Parts of a dotted key. The time that the parser takes grows with their square: of 20000 it takes ten seconds.
_MOST_PARTS: Final = 1000

#: Why there has to be a `patch.toml`, in a message.
MISSING: Final = "each folder of patches needs one"


def read_toml(file: Path, read: Callable[[Path], bytes], missing: str) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        CatalogueError: it cannot be read (`missing` says what it is for), or is no TOML.
    """
    return _parse(file, _read(file, read, missing))


def read_patch_tomls(files: Sequence[Path], base: Path) -> dict[Path, dict[str, Any]]:
    """The values of each `patch.toml` of a catalogue, from the cache if these very bytes were parsed before.

    Args:
        files: of one catalogue.
        base: a cache folder that can be trusted. Whatever is wrong with what is kept there, the files are parsed.

    Raises:
        CatalogueError: one cannot be read, or is no TOML.
    """
    texts = {file: _read(file, Path.read_bytes, MISSING) for file in files}
    key, kept = _key(texts), base / FOLDER / _name(files)
    found = _kept(kept, key)
    if found is not None:
        return dict(zip(texts, found, strict=True))
    values = {file: _parse(file, text) for file, text in texts.items()}
    try:
        body = json.dumps(list(values.values())).encode()
    except TypeError:
        return values  # with a date, which no key of a `patch.toml` may have: who asks for the values refuses them
    try:
        keep_sealed(kept, key + body)
    except (OSError, UntrustedFolder) as error:
        logger.debug("the parsed catalogue is not kept, each start parses it: %s", error)
    return values


def _kept(file: Path, key: bytes) -> list[dict[str, Any]] | None:
    try:
        body = read_sealed(trusted_folder(file.parent) / file.name)
    except (OSError, UntrustedFolder):
        return None  # not there yet; or not to be trusted, which is said where it cannot be written either
    if body is None or body[: len(key)] != key:
        return None
    values: list[dict[str, Any]] = json.loads(bytes(body[len(key) :]))
    return values


def _key(texts: Mapping[Path, bytes]) -> bytes:
    # Two releases of Python may know two of TOML.
    digest = hashlib.sha256(f"{__version__}\0{sys.version}\0".encode())
    for file, text in texts.items():
        digest.update(f"{file.parent.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.digest()


def _name(files: Sequence[Path]) -> str:
    # One for each catalogue and Python: a catalogue that changes leaves nothing behind.
    catalogue = os.fsencode(files[0].parent.parent) if files else b""
    return f"{hashlib.sha256(catalogue).hexdigest()[:20]}.{sys.implementation.cache_tag}.json"


def _read(file: Path, read: Callable[[Path], bytes], missing: str) -> bytes:
    try:
        return read(file)
    except OSError as error:
        raise CatalogueError(f"{file}: can't be read ({error.strerror}); {missing}") from error


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if any(line.count(b".") > _MOST_PARTS for line in text.splitlines()):
        raise CatalogueError(f"{file}: has a line with more than {_MOST_PARTS} dots; shorten its dotted key")
    try:
        values: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # Of values nested too deep, or of numbers too long for Python, as well.
        raise CatalogueError(f"{file}: not TOML ({error}); see docs/your-own-patches.md") from error
    return values
