# SPDX-License-Identifier: Apache-2.0
"""Texts of a version in a folder or a wheel file, and their errors."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from packaging.version import Version

from vllm_hwplugin.base.cachedir import LARGEST, read_ordinary
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.versions import is_version, stated_version

# What `zipfile` raises for damaged archives: a bad directory or checksum, a truncated stream, unknown compression or
# encryption, invalid names and offsets.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error, ValueError)


#: vLLM's version if its build did not find one.
NO_VERSION = "dev"


class SourceError(HwpluginError):
    """The text of a version could not be read."""


class IndexUnreachable(SourceError):
    """The package index did not answer as an index, or a library to read it is not installed."""


def decode(data: bytes, where: str) -> str:
    """Decode a file as UTF-8, the encoding of vLLM's sources."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: cannot be read ({error}); check it, or download it again") from error


def too_large(name: str) -> str:
    """Return why something is not read to its end."""
    return f"{name} has {LARGEST >> 20} MiB or more, expected less: no file of vLLM is that large; it is not read"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _version(metadata: Iterable[str], module: str | None) -> str | None:
    """Return vLLM's version from its metadata, else from its `_version.py`."""
    # pip reads the metadata. Anything that is not a PEP 440 version counts as absent.
    stated = [HeaderParser().parsestr(text).get("Version") for text in metadata]
    candidates = filter(None, [*stated, stated_version(module or "")])
    return next((str(Version(text)) for text in candidates if is_version(text)), None)


class TreeSource:
    """A vLLM in a folder: a git checkout, an unpacked wheel or a site-packages folder.

    Args:
        folder: The folder that holds `vllm/`.
        version: Its version; None: read from the tree.
        otherwise: Its version if the tree states none.

    Raises:
        SourceError: There is no `vllm/` package, or its version is neither given nor stated.
    """

    def __init__(self, folder: Path, version: str | None = None, *, otherwise: str | None = None) -> None:
        if not (folder / "vllm").is_dir():
            raise SourceError(f"{folder}: no vllm/ package in this folder; name the folder that contains vllm/")
        self._folder = folder
        # In site-packages plugins have such names, too; only vLLM's RECORD has vLLM's files.
        names = sorted(path.name for path in folder.glob("vllm*.dist-info"))
        records = {name: self.read(f"{name}/RECORD") for name in names}
        own = [name for name, text in records.items() if text is None or "\nvllm/__init__.py," in f"\n{text}"]
        metadata = [self.read(f"{name}/METADATA") or "" for name in own]
        version = version or _version(metadata, self.read("vllm/_version.py"))
        version = version or otherwise
        if version is None:
            raise SourceError(
                f"{folder}: states no version (no vllm*.dist-info/METADATA, no vllm/_version.py); "
                f"name it: {folder}@0.33.0, or use `drift --ahead {folder}` for vLLM's main branch"
            )
        self.version = version
        self.label = str(folder) if version == NO_VERSION else f"{folder} ({version})"

    def read(self, path: str) -> str | None:
        """Return a file's text with its line ends, or None."""
        file = self._folder.joinpath(*PurePosixPath(path).parts)
        try:
            return None if file.is_dir() else decode(read_ordinary(file), str(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceError(f"{file}: cannot be read ({error}); check the tree") from error

    def named(self, name: str) -> list[str]:
        """Return the paths of vLLM's files of this name."""
        return sorted(file.relative_to(self._folder).as_posix() for file in (self._folder / "vllm").rglob(name))


class WheelSource:
    """A wheel file of vLLM, or of another distribution.

    Args:
        package: The package that the wheel must contain; None: any.

    Raises:
        SourceError: The file is not a valid zip archive, lacks the package, or states no version.
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
        version = _version([self.read(name) or "" for name in metadata], self.read("vllm/_version.py"))
        if version is None:
            raise SourceError(
                f"{path}: states no version (no usable METADATA, no vllm/_version.py); "
                "unpack it and name the folder with its version: FOLDER@0.33.0"
            )
        self.version = version
        self.label = path.name

    def read(self, path: str) -> str | None:
        """Return a member's text with its line ends, or None."""
        return None if path not in self._zip.NameToInfo else text_of(self._zip, path, str(self._path))

    def named(self, name: str) -> list[str]:
        """Return the paths of vLLM's files of this name."""
        return [path for path in self._zip.namelist() if path.startswith("vllm/") and path.endswith(f"/{name}")]


class _File(io.FileIO):
    """A wheel file with a size limit on each read, because the directory is read in one piece."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size >= LARGEST:
            raise zipfile.BadZipFile(too_large("its directory"))
        return super().read(size)


def text_of(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """Return the text of a member after verifying its checksum.

    Raises:
        SourceError: The member is damaged, too large, or not text.
    """
    try:
        return member_text(wheel, name, where)
    except DAMAGE as error:
        raise SourceError(f"{where}: {name} is damaged ({one_line(error)}); download the wheel again") from error


def member_text(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """Return a member's text, and let `zipfile`'s errors through."""
    stated = wheel.getinfo(name).file_size
    if stated >= LARGEST:
        raise SourceError(too_large(f"{where}: {name}"))
    with wheel.open(name) as file:
        # One byte more than stated reaches the end, where `zipfile` verifies the checksum; excess data stays packed.
        return decode(file.read(stated + 1), f"{where}: {name}")
