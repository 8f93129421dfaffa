# SPDX-License-Identifier: Apache-2.0
"""The text of a version in a folder or in a wheel file, and what is told where it cannot be read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.patching import Source
from vllm_hwplugin.versions import stated_version

# What `zipfile` raises for damaged archives: a torn directory, a bad check sum, a stream cut short, and methods or
# encryption that it does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


class SourceError(HwpluginError):
    """The text of a version could not be read: one line says what was looked at, what was found and what to do."""


class IndexUnreachable(SourceError):
    """The package index did not answer as an index does, or what asks it is not installed."""


class ReadSource(NamedTuple):
    """A vLLM of which only the files that were asked for are known; see `read_ahead`."""

    label: str
    version: str
    texts: Mapping[str, str | None]

    def read(self, path: str) -> str | None:
        """The text of a file; None where this vLLM has none.

        Raises:
            KeyError: it was not read.
        """
        return self.texts[path]


def read_ahead(source: Source, paths: Iterable[str]) -> ReadSource:
    """Read these files at once, so that a wheel or a connection need not stay open; raises as `source.read` does."""
    return ReadSource(source.label, source.version, {path: source.read(path) for path in paths})


def decode(data: bytes, where: str) -> str:
    """The text of a file; Python sources are UTF-8 unless they say otherwise, and vLLM's do not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: cannot be read ({error}); check it, or download it again") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def find_version(metadata: Iterable[str], read: Callable[[str], str | None]) -> str | None:
    """The version of a vLLM: from its core metadata, else from `vllm/_version.py`.

    Metadata comes first because it is what pip believes. Anything that is not a PEP 440 version counts as absent.
    """
    stated = [HeaderParser().parsestr(text).get("Version") for text in metadata]
    if (module := read("vllm/_version.py")) is not None:
        stated.append(stated_version(module))
    for candidate in filter(None, stated):
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

    Raises:
        SourceError: there is no `vllm/` package, or its version is neither given nor written down.
    """

    def __init__(self, folder: Path, version: str | None = None) -> None:
        if not (folder / "vllm").is_dir():
            raise SourceError(f"{folder}: no vllm/ package in this folder; name the folder that holds vllm/")
        self._folder = folder
        metadata = [file.relative_to(folder).as_posix() for file in sorted(folder.glob("vllm*.dist-info/METADATA"))]
        found = version or find_version([self.read(path) or "" for path in metadata], self.read)
        if found is None:
            raise SourceError(
                f"{folder}: its version is not written down (no vllm*.dist-info/METADATA, no vllm/_version.py); "
                f"name it: {folder}@0.33.0"
            )
        self.version = found
        self.label = f"{folder} ({found})"

    def read(self, path: str) -> str | None:
        """The text of a file, newlines untouched; None where there is no such file."""
        file = self._folder.joinpath(*PurePosixPath(path).parts)
        try:
            return decode(file.read_bytes(), str(file))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
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
            self._zip = zipfile.ZipFile(path)
        except (*DAMAGE, OSError) as error:
            raise SourceError(
                f"{path}: not a readable wheel ({one_line(error)}); name a complete .whl file, or download it again"
            ) from error
        self.version = version_of(self._zip, str(path), package)
        self.label = path.name

    def read(self, path: str) -> str | None:
        """The text of a member, newlines untouched; None where there is no such member."""
        return None if path not in self._zip.NameToInfo else text_of(self._zip, path, str(self._path))


def version_of(wheel: zipfile.ZipFile, where: str, package: str | None) -> str:
    """The version that an open wheel states.

    Raises:
        SourceError: it states none, or holds no module of the package.
    """
    names = wheel.NameToInfo
    if not any(holds(package, name) for name in names):
        what = f"no {package}/ package in this wheel; name a wheel of vLLM" if package else "no Python in this wheel"
        raise SourceError(f"{where}: {what}")
    metadata = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
    found = find_version(
        [text_of(wheel, name, where) for name in metadata],
        lambda name: text_of(wheel, name, where) if name in names else None,
    )
    if found is None:
        raise SourceError(
            f"{where}: states no version (no usable METADATA, no vllm/_version.py); "
            "unpack it and name the folder with its version: FOLDER@0.33.0"
        )
    return found


def holds(package: str | None, member: str) -> bool:
    """Whether a member is a module of `package`; of any package where that is None."""
    return member.endswith(".py") and (package is None or member.startswith(f"{package}/"))


def text_of(wheel: zipfile.ZipFile, name: str, where: str) -> str:
    """The text of a member, its check sum verified."""
    try:
        return decode(wheel.read(name), f"{where}: {name}")
    except DAMAGE as error:
        raise SourceError(f"{where}: {name} is damaged ({one_line(error)}); download the wheel again") from error
