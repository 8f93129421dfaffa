# SPDX-License-Identifier: Apache-2.0
"""vLLM sources in a folder: a git checkout, an unpacked wheel or a site-packages folder."""

from __future__ import annotations

from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from vllm_hwplugin.versions import stated_version

from ._errors import BadTree
from ._limits import TooLarge, file_bytes


def version_in_metadata(text: str) -> str | None:
    """The `Version` field of core metadata (the METADATA file of a wheel)."""
    field: str | None = HeaderParser().parsestr(text).get("Version")
    return field


def find_version(metadata: list[str], read: Callable[[str], str | None]) -> str | None:
    """The version of a vLLM: from its core metadata, else from `vllm/_version.py`.

    Metadata comes first because it is what pip believes. Anything that is not a PEP 440 version counts as absent.
    """
    stated = [version_in_metadata(text) for text in metadata]
    version_module = read("vllm/_version.py")
    if version_module is not None:
        stated.append(stated_version(version_module))
    for candidate in stated:
        if candidate is not None:
            try:
                return str(Version(candidate))
            except InvalidVersion:
                continue
    return None


class TreeSource:
    """A vLLM whose package folder lies directly under a folder.

    Args:
        folder: the folder that holds `vllm/`.
        version: the version to take it for; read from the tree when None.

    Raises:
        BadTree: there is no `vllm/` package, or its version is neither given nor written down.
    """

    def __init__(self, folder: Path, version: str | None = None) -> None:
        if not (folder / "vllm").is_dir():
            raise BadTree(f"{folder}: no vllm/ package in this folder; name the folder that holds vllm/")
        self._folder = folder
        found = version or find_version(
            [_text(file) for file in sorted(folder.glob("vllm*.dist-info/METADATA"))], self.read
        )
        if found is None:
            raise BadTree(
                f"{folder}: its version is not written down (no vllm*.dist-info/METADATA, no vllm/_version.py); "
                f"name it: {folder}@0.33.0"
            )
        self.version = found
        self.label = f"{folder} ({found})"

    def read(self, path: str) -> str | None:
        """The text of a file, newlines untouched; None where there is no such file."""
        file = self._folder.joinpath(*PurePosixPath(path).parts)
        try:
            return _text(file)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None


def _text(file: Path) -> str:
    try:
        return file_bytes(file).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except (OSError, UnicodeDecodeError, TooLarge) as error:
        raise BadTree(f"{file}: cannot be read ({error}); check the tree") from error
