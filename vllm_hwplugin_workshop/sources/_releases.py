# SPDX-License-Identifier: Apache-2.0
"""Which file of a package index is *the* wheel of a version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from packaging.tags import Tag
from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from ._errors import UnknownVersion

# What the formats of wheels and sdists allow; above all no separator.
_FILE_NAME = re.compile(r"[\w.!+-]+")


class IndexFile(Protocol):
    """The part of an index's file entry that is used here (pypi-simple's `DistributionPackage`)."""

    filename: str
    url: str
    digests: dict[str, str]
    is_yanked: bool


@dataclass(frozen=True, slots=True)
class Release:
    """One wheel on an index, or one that was read before (`url` is None then)."""

    filename: str
    version: Version
    build: BuildTag
    platforms: tuple[str, ...]
    url: str | None = None
    sha256: str | None = None
    yanked: bool = False


def is_file_name(text: str) -> bool:
    """Whether a name that an index gives can be that of a distribution's file, and not a path."""
    return _FILE_NAME.fullmatch(text) is not None


def parse_release(
    filename: str, *, url: str | None = None, digests: Mapping[str, str] | None = None, yanked: bool = False
) -> tuple[str, Release] | None:
    """The project and release that a file name states; None for anything but a wheel."""
    if not is_file_name(filename):
        # It becomes the name of a folder in the cache, and `packaging` takes any text for a build tag.
        return None
    try:
        name, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return None
    platforms = tuple(sorted({_platform(tag) for tag in tags}))
    digest = (digests or {}).get("sha256")
    return name, Release(filename, version, build, platforms, url=url, sha256=digest, yanked=yanked)


def releases_of(project: str, files: Iterable[IndexFile]) -> list[Release]:
    """The wheels of a project; sdists, and names that state no version, are left out."""
    wanted = canonicalize_name(project)
    parsed = (parse_release(f.filename, url=f.url, digests=f.digests, yanked=f.is_yanked) for f in files)
    return [entry[1] for entry in parsed if entry is not None and entry[0] == wanted]


def choose(project: str, version: str, releases: Iterable[Release]) -> Release:
    """The wheel that stands for a version.

    As pip would: a version without local label also finds `+label` builds, and of several builds of one version
    (`0.20.1-1`) the newest counts, because a newer build may hold other Python text. What pip decides by the host is
    fixed here (x86_64, then the file name), so that the answer is the same everywhere: vLLM's Python files do not
    differ between platforms.

    Raises:
        UnknownVersion: no wheel has this version.
    """
    known = list(releases)
    wanted = Version(version)
    matching = [release for release in known if _matches(release.version, wanted)]
    if not matching:
        raise UnknownVersion(_unknown(project, wanted, known))
    return max(matching, key=_rank)


def versions_of(project: str, releases: Iterable[Release]) -> list[Version]:
    """The versions of a project's wheels, oldest first. Yanked wheels do not count, and neither do nightly builds.

    Raises:
        UnknownVersion: there is none.
    """
    found = {Version(item.version.public) for item in releases if not item.yanked and not item.version.is_devrelease}
    if not found:
        raise UnknownVersion(
            f"{project}: the package index lists no wheel of it; see whether it is the right one (pip config list)"
        )
    return sorted(found)


def newest(versions: list[Version]) -> tuple[str, ...]:
    """Of `versions_of`, the newest release, and behind it the newest pre-release where that is newer."""
    last = versions[-1]
    released = next((version for version in reversed(versions) if not version.is_prerelease), last)
    return (str(released),) if released == last else (str(released), str(last))


def _matches(found: Version, wanted: Version) -> bool:
    return found == wanted or (wanted.local is None and Version(found.public) == wanted)


def _rank(release: Release) -> tuple[bool, Version, tuple[int, str], bool, str]:
    x86 = any("x86_64" in platform or platform == "any" for platform in release.platforms)
    build = (release.build[0], release.build[1]) if release.build else (-1, "")
    return not release.yanked, release.version, build, x86, release.filename


def _unknown(project: str, wanted: Version, known: list[Release]) -> str:
    versions = sorted({release.version for release in known})
    if not versions:
        return (
            f"{project} {wanted}: the package index lists no wheel of {project}; see whether it is the right one (pip "
            "config list), or name a wheel file or a folder"
        )
    older = [version for version in versions if version < wanted][-2:]
    newer = [version for version in versions if version > wanted][:2]
    near = ", ".join(str(version) for version in [*older, *newer])
    return f"{project} {wanted}: the package index has no wheel of this version; the nearest are {near}"


def _platform(tag: Tag) -> str:
    return tag.platform
