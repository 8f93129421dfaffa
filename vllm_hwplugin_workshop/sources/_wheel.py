# SPDX-License-Identifier: Apache-2.0
"""vLLM sources in a wheel file on disk."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from ._errors import BadWheel
from ._limits import TooLarge, unpacked
from ._tree import find_version

# What `zipfile` raises for damaged archives: a torn directory, a bad check sum, a stream cut short, and methods or
# encryption that it does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def metadata_members(names: list[str]) -> list[str]:
    """The core metadata files among a wheel's members (one in a sound wheel)."""
    return [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]


def holds(package: str | None, member: str) -> bool:
    """Whether a member is a module of `package`; of any package where that is None."""
    return member.endswith(".py") and (package is None or member.startswith(f"{package}/"))


def no_modules(label: str, package: str | None) -> str:
    """The message for a wheel that has none of the modules."""
    if package is None:
        return f"{label}: no Python module in this wheel; nothing in it can be patched"
    return f"{label}: no {package}/ package in this wheel; name a wheel of vLLM"


def decode(data: bytes, where: str) -> str:
    """The text of a member; Python sources are UTF-8 unless they say otherwise, and vLLM's do not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadWheel(f"{where}: not UTF-8 text ({error}); download the wheel again") from error


class WheelSource:
    """A vLLM wheel, or one of another distribution.

    Args:
        package: the package that it has to hold; None for a distribution of other packages.

    Raises:
        BadWheel: the file is not a sound zip archive, does not hold the package, or states no version.
    """

    def __init__(self, path: Path, package: str | None = "vllm") -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
            self._names = frozenset(self._zip.namelist())
        except (*DAMAGE, OSError) as error:
            raise BadWheel(
                f"{path}: not a readable wheel ({_one_line(error)}); name a complete .whl file, or download it again"
            ) from error
        if not any(holds(package, name) for name in self._names):
            raise BadWheel(no_modules(str(path), package))
        metadata = [self._read(name) for name in metadata_members(sorted(self._names))]
        found = find_version(metadata, self.read)
        if found is None:
            raise BadWheel(
                f"{path}: states no version (no usable METADATA, no vllm/_version.py); "
                f"unpack it and name the folder with its version: FOLDER@0.33.0"
            )
        self.version = found
        self.label = path.name

    def read(self, path: str) -> str | None:
        """The text of a member, newlines untouched; None where there is no such member."""
        return self._read(path) if path in self._names else None

    def members(self) -> list[zipfile.ZipInfo]:
        return self._zip.infolist()

    def read_bytes(self, name: str) -> bytes:
        """The bytes of a member, its check sum verified."""
        try:
            return unpacked(self._zip, name)
        except TooLarge as error:
            raise BadWheel(f"{self._path}: {name} has {error}, as no file of vLLM; name another wheel") from error
        except (*DAMAGE, OSError) as error:
            raise BadWheel(f"{self._path}: {name} is damaged ({_one_line(error)}); download the wheel again") from error

    def close(self) -> None:
        self._zip.close()

    def _read(self, name: str) -> str:
        return decode(self.read_bytes(name), f"{self._path}: {name}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
