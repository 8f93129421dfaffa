# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM, ranges of versions, and the version that a tree states.

Ranges are PEP 440's and `packaging` knows what they mean. But importing its specifiers is a tenth of what a process of
vLLM pays for the plugin, and nearly every question is whether a released version (``0.32.0``) lies between two others.
Those are answered by comparing numbers; anything else is `packaging`'s to answer.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, Final

SUPPORTED: Final = (
    "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.25.1",
    "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""The released versions of vLLM that every feature has a verdict for."""

_MAJOR, _MINOR, *_ = SUPPORTED[-1].split(".")
UNKNOWN_FROM: Final = f"{_MAJOR}.{int(_MINOR) + 1}"
"""The first minor version of vLLM of which nothing is known: what is said of the versions before ends here."""

# As setuptools-scm and its successors write it: `__version__ = version = '0.32.0'`, or the first name alone.
_STATEMENT: Final = r"""^__version__\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]"""

_Release = tuple[int, ...]
# The longer signs first: each clause is compared by the first one that it begins with.
_PLAIN: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def is_supported(version: str) -> bool:
    """Whether a version is one of `SUPPORTED`, however it is spelt (`0.33`, `v0.33.0`) and whoever built it (`+cu130`).

    Pre-releases, post-releases and what is no PEP 440 version are not.
    """
    if version in SUPPORTED:
        return True
    from packaging.version import InvalidVersion, Version

    try:
        public = Version(Version(version).public)
    except InvalidVersion:
        return False
    return any(Version(item) == public for item in SUPPORTED)


def stated_version(text: str) -> str | None:
    """The version that the text of a `vllm/_version.py` states, without running it; None where it states none."""
    match = re.search(_STATEMENT, text, re.MULTILINE)
    return match and match[1]


class Versions:
    """A range such as ``>=0.20.0,<0.22.0``. Two are equal where they have the same clauses.

    Raises:
        ValueError: the text is no PEP 440 specifier.
    """

    __slots__ = ("_clauses", "_plain", "_specifier")

    def __init__(self, text: str) -> None:
        self._clauses = tuple(sorted(clause.replace(" ", "") for clause in text.split(",") if clause.strip()))
        plain = [_plain(clause) for clause in self._clauses]
        self._plain = None if None in plain else [item for item in plain if item is not None]
        self._specifier: Any = None
        if self._plain is None:
            self._specifier = self._of_packaging()

    def _of_packaging(self) -> Any:
        from packaging.specifiers import SpecifierSet  # its InvalidSpecifier is a ValueError

        return SpecifierSet(str(self))

    def covers(self, version: str) -> bool:
        """Whether the range holds a version; what is no version at all (vLLM's fall-back is `dev`) is in none."""
        release = _release(version)
        if self._plain is not None and release is not None:
            return all(compare(release, bound) for compare, bound in self._plain)
        if self._specifier is None:
            self._specifier = self._of_packaging()
        from packaging.version import InvalidVersion, Version

        try:
            # Asked here: what packaging's specifiers do with a text that is no version differs between its releases.
            Version(version)
        except InvalidVersion:
            return False
        return bool(self._specifier.contains(version, prereleases=True))

    def names(self, version: str) -> bool:
        """Whether a clause spells this version out."""
        return any(clause in (f"=={version}", f"==={version}") for clause in self._clauses)

    @property
    def has_end(self) -> bool:
        """Whether a clause ends the range, so that it says nothing of releases that are still to come."""
        return any(clause.startswith(("<", "==", "~=")) for clause in self._clauses)

    def edges(self) -> list[str]:
        """The versions that its clauses name, and one just behind each: two ranges that overlap both hold one."""
        named = [clause.lstrip("<>=!~").removesuffix(".*") for clause in self._clauses]
        return [*named, *(f"{version}.0.0.1" for version in named)]

    def supported(self) -> list[str]:
        """Those of `SUPPORTED` that the range holds."""
        return [version for version in SUPPORTED if self.covers(version)]

    def __str__(self) -> str:
        return ",".join(self._clauses)

    def __repr__(self) -> str:
        return f"Versions({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return self._clauses == other._clauses if isinstance(other, Versions) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._clauses)


# Most ranges begin or end where others do.
@functools.lru_cache(maxsize=256)
def _plain(clause: str) -> tuple[Callable[[Any, Any], bool], _Release] | None:
    """The clause as a comparison of numbers; None where it is not as simple as that."""
    for sign, compare in _PLAIN.items():
        if clause.startswith(sign):
            bound = _release(clause.removeprefix(sign))
            return None if bound is None else (compare, bound)
    return None


# The same dozen versions are asked for again and again, for each range of each feature.
@functools.lru_cache(maxsize=256)
def _release(version: str) -> _Release | None:
    """``0.32.0`` as numbers, less zeros at the end; None for a version that is more than those."""
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    while len(parts) > 1 and not int(parts[-1]):
        parts.pop()
    return tuple(int(part) for part in parts)
