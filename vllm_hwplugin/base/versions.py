# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM, ranges of versions, and the version that a tree states."""

from __future__ import annotations

import functools
import re
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED: Final = (
    "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1",
    "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""The released versions of vLLM that every feature has a verdict for."""

_MAJOR, _MINOR, *_ = SUPPORTED[-1].split(".")
UNKNOWN_FROM: Final = f"{_MAJOR}.{int(_MINOR) + 1}"
"""The first minor version of vLLM about which nothing is known."""

# As setuptools-scm and its successors write it: `__version__ = version = '0.32.0'`, or `__version__ = '0.32.0'`.
_STATEMENT: Final = r"""^__version__\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]"""


@functools.lru_cache(maxsize=64)
def supported_as(version: str) -> str | None:
    """Return the entry of `SUPPORTED` that a version is, or None.

    Spelling (`0.33`, `v0.33.0`) and build (`+cu130`) do not matter; pre-releases and post-releases are not supported.
    """
    try:
        public = Version(Version(version).public)
    except InvalidVersion:
        return None
    return next((release for release in SUPPORTED if Version(release) == public), None)


def is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def is_supported(version: str) -> bool:
    return supported_as(version) is not None


def final(version: str) -> str:
    """Return the release of a candidate or build; else the text unchanged."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return version


def stated_version(text: str) -> str | None:
    """Return the version in the text of a `vllm/_version.py`, or None."""
    match = re.search(_STATEMENT, text, re.MULTILINE)
    return match and match[1]


class Versions:
    """A range such as ``>=0.20.0,<0.22.0``, or several: ``<0.22 || >=0.24``. Ranges with the same clauses are equal.

    Raises:
        ValueError: the text is not a PEP 440 specifier, or several.
    """

    __slots__ = ("_ranges",)

    def __init__(self, text: str) -> None:
        self._ranges = tuple(
            tuple(sorted((clause.replace(" ", "") for clause in part.split(",") if clause.strip()), key=_from_below))
            for part in text.split("||")
        )
        if len(self._ranges) > 1 and () in self._ranges:
            raise ValueError(f"{text!r} has a range without a clause next to '||'")
        for clauses in self._ranges:
            _specifier(clauses)

    def covers(self, version: str) -> bool:
        """Whether the range holds a version; no range holds `dev`."""
        return any(_holds(clauses, version) for clauses in self._ranges)

    def names(self, version: str) -> bool:
        """Whether a clause names exactly this version."""
        return any(clause in (f"=={version}", f"==={version}") for clauses in self._ranges for clause in clauses)

    @property
    def has_end(self) -> bool:
        """Whether a clause ends the range, so that later releases are outside."""
        return all(any(clause.startswith(("<", "==", "~=")) for clause in clauses) for clauses in self._ranges)

    def edges(self) -> list[str]:
        """Return the clauses' versions, and one just above each.

        Two ranges that overlap share an edge.
        """
        named = [clause.lstrip("<>=!~").removesuffix(".*") for clauses in self._ranges for clause in clauses]
        return [*named, *(f"{version}.0.0.1" for version in named)]

    def supported(self) -> list[str]:
        return [version for version in SUPPORTED if self.covers(version)]

    def __str__(self) -> str:
        return " || ".join(map(",".join, self._ranges))

    def __repr__(self) -> str:
        return f"Versions({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return self._ranges == other._ranges if isinstance(other, Versions) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ranges)


def _from_below(clause: str) -> tuple[bool, str]:
    return not clause.startswith(">"), clause


# Many hunks and features have the same range, and are asked for the same version.
@functools.lru_cache(maxsize=1024)
def _holds(clauses: tuple[str, ...], version: str) -> bool:
    try:
        # Releases of packaging differ in how their specifiers treat a text that is no version.
        Version(version)
    except InvalidVersion:
        return False
    return _specifier(clauses).contains(version, prereleases=True)


@functools.lru_cache(maxsize=256)
def _specifier(clauses: tuple[str, ...]) -> SpecifierSet:
    return SpecifierSet(",".join(clauses))  # its InvalidSpecifier is a ValueError
