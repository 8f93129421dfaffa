# SPDX-License-Identifier: Apache-2.0
"""The text of a version in a folder or in a wheel file, and what is told where it cannot be read."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from vllm_hwplugin.cachedir import LARGEST, read_ordinary
from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.versions import stated_version

# What `zipfile` raises for damaged archives: a torn directory, a bad check sum, a stream cut short, methods or
# encryption that it does not know, and names and offsets that are none.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error, ValueError)


#: What vLLM calls itself where its build did not learn a version.
NO_VERSION = "dev"


class SourceError(HwpluginError):
    """The text of a version could not be read: one line says what was looked at, what was found and what to do."""


class IndexUnreachable(SourceError):
    """The package index did not answer as an index does, or what asks it is not installed."""


def decode(data: bytes, where: str) -> str:
    """The text of a file; Python sources are UTF-8 unless they say otherwise, and vLLM's do not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: cannot be read ({error}); check it, or download it again") from error


def too_large(what: str) -> str:
    """Why something is not read to its end."""
    return f"{what} has {LARGEST >> 20} MiB or more, which no file of a vLLM has; it is not read"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _version(metadata: Iterable[str], module: str | None) -> str | None:
    """The version of a vLLM: from its core metadata, else from the text of `vllm/_version.py`.

    Metadata comes first because it is what pip believes. Anything that is not a PEP 440 version counts as absent.
    """
    stated = [HeaderParser().parsestr(text).get("Version") for text in metadata]
    for candidate in filter(None, [*stated, stated_version(module or "")]):
        try:
            return str(Version(candidate))
        except InvalidVersion:
            continue
    return None


class TreeSource:
    """A vLLM in a folder: a git checkout, an unpacked wheel or a site-packages folder.

    Args:
        folder: the folder that holds `vllm/`.
        version: the version to take it for; read from the tree when None.
        otherwise: its version where none is written down.

    Raises:
        SourceError: there is no `vllm/` package, or its version is neither given nor written down.
    """

    def __init__(self, folder: Path, version: str | None = None, *, otherwise: str | None = None) -> None:
        if not (folder / "vllm").is_dir():
            raise SourceError(f"{folder}: no vllm/ package in this folder; name the folder that holds vllm/")
        self._folder = folder
        metadata = [file.relative_to(folder).as_posix() for file in sorted(folder.glob("vllm*.dist-info/METADATA"))]
        found = version or _version([self.read(path) or "" for path in metadata], self.read("vllm/_version.py"))
        found = found or otherwise
        if found is None:
            raise SourceError(
                f"{folder}: its version is not written down (no vllm*.dist-info/METADATA, no vllm/_version.py); "
                f"name it: {folder}@0.33.0, or use `drift --ahead {folder}` for vLLM's main branch"
            )
        self.version = found
        self.label = str(folder) if found == NO_VERSION else f"{folder} ({found})"

    def read(self, path: str) -> str | None:
        """The text of a file, newlines untouched; None where there is no such file."""
        file = self._folder.joinpath(*PurePosixPath(path).parts)
        try:
            return None if file.is_dir() else decode(read_ordinary(file), str(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceError(f"{file}: cannot be read ({error}); check the tree") from error


class WheelSource:
    """A wheel file of vLLM, or of another distribution.

    Args:
        package: the package that it has to hold; None for a distribution of other packages.

    Raises:
        SourceError: the file is not a sound zip archive, does not hold the package, or states no version.
    """

    def __init__(self, path: Path, package: str | None = "vllm") -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(_File(path))
        except (*DAMAGE, OSError) as error:
            raise SourceError(
                f"{path}: not a readable wheel ({one_line(error)}); name a complete .whl file, or download it again"
            ) from error
        names = self._zip.namelist()
        if not any(name.endswith(".py") and name.startswith(f"{package}/" if package else "") for name in names):
            raise SourceError(f"{path}: no {package or 'Python'} package in this wheel; name another wheel")
        metadata = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
        found = _version([self.read(name) or "" for name in metadata], self.read("vllm/_version.py"))
        if found is None:
            raise SourceError(
                f"{path}: states no version (no usable METADATA, no vllm/_version.py); "
                "unpack it and name the folder with its version: FOLDER@0.33.0"
            )
        self.version = found
        self.label = path.name

    def read(self, path: str) -> str | None:
        """The text of a member, newlines untouched; None where there is no such member."""
        return None if path not in self._zip.NameToInfo else text_of(self._zip, path, str(self._path))


class _File(io.FileIO):
    """A wheel file, of which no more is read in one piece than a text may have: the directory is one."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size >= LARGEST:
            raise zipfile.BadZipFile(too_large("its directory"))
        return super().read(size)


def text_of(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """The text of a member, its check sum verified.

    Raises:
        SourceError: it is damaged, too large, or no text.
    """
    try:
        return member_text(wheel, name, where)
    except DAMAGE as error:
        raise SourceError(f"{where}: {name} is damaged ({one_line(error)}); download the wheel again") from error


def member_text(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """As `text_of`, with what `zipfile` raises of a damaged member."""
    stated = wheel.getinfo(name).file_size
    if stated >= LARGEST:
        raise SourceError(too_large(f"{where}: {name}"))
    with wheel.open(name) as file:
        # One byte more than stated reaches the end, where the check sum is compared; what follows stays packed.
        return decode(file.read(stated + 1), f"{where}: {name}")
