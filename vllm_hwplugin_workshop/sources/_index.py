# SPDX-License-Identifier: Apache-2.0
"""Texts of vLLM and other distributions from wheels on the user's package index, without downloading whole wheels.

A wheel is a zip archive. Range requests read its directory, at the end, and the few members that patches touch, so all
versions together cost megabytes. The user's cache has a folder per wheel: `members.json` (size and CRC-32 of each
Python file, from the wheel's directory) and the members that were read. A cached member is used only if its CRC
matches, so a damaged file is fetched again. These texts are compared with patches and never run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from vllm_hwplugin.base.cachedir import own_folder, write_atomically

from ._pip import PipConfig, host_of, pip_config
from ._text import IndexUnreachable, SourceError, decode, member_text

_FORMAT = 1
_DIRECTORY = "members.json"

Out = TypeVar("Out")


class Release(NamedTuple):
    """A wheel on an index, or in the cache (`url` None)."""

    filename: str
    project: str
    version: Version
    build: tuple[int, str]
    is_x86: bool
    url: str | None = None
    sha256: str | None = None
    yanked: bool = False


def parse_release(filename: str, **more: Any) -> Release | None:
    """Parse a wheel's file name; None: not the name of a wheel."""
    # The name becomes a folder in the cache, an index may send a path, and `packaging` takes any text for a build tag.
    if re.fullmatch(r"[\w.!+-]+", filename) is None:
        return None
    try:
        project, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return None
    is_x86 = any(tag.platform == "any" or "x86_64" in tag.platform for tag in tags)
    return Release(filename, project, version, build or (-1, ""), is_x86, **more)


def choose(project: str, version: str, releases: Iterable[Release]) -> Release:
    """Choose the wheel of a version.

    As pip does: a version without local label also matches `+label` builds, and the newest of several builds of one
    version (`0.20.1-1`) wins, because it may hold other Python text. The platform is fixed (x86_64, then the file
    name), so that the result is the same on every host: vLLM's Python files do not differ between platforms.

    Raises:
        SourceError: No wheel has this version.
    """
    known, wanted = list(releases), Version(version)
    matching = [
        wheel
        for wheel in known
        if wanted in (wheel.version, *([] if wanted.local else [Version(wheel.version.public)]))
    ]
    if matching:
        return max(
            matching, key=lambda wheel: (not wheel.yanked, wheel.version, wheel.build, wheel.is_x86, wheel.filename)
        )
    versions = sorted({wheel.version for wheel in known})
    if not versions:
        raise _no_wheel(project)
    near = [*[known for known in versions if known < wanted][-2:], *[known for known in versions if known > wanted][:2]]
    raise SourceError(
        f"{project} {wanted}: the package index has no wheel of this version; the nearest are "
        f"{', '.join(map(str, near))}"
    )


def _no_wheel(project: str) -> SourceError:
    return SourceError(
        f"{project}: the package index lists no wheel; check pip's index setting (pip config list), or name a wheel "
        "file or a folder"
    )


class Index:
    """The package indexes that pip is configured for.

    An object fetches each project's page once. If no index answers, cached wheels are used, with a note.

    Args:
        config: The indexes; None: pip's configuration, read at first use.
        cache: The cache's folder; None: the user's cache folder.

    Attributes:
        notes: Notes for the user on how the answers came about (the keys; values are None).
    """

    def __init__(self, config: PipConfig | None = None, cache: Path | None = None, *, retries: int = 4) -> None:
        self._config = config
        self.cache = cache if cache is not None else own_folder() / "sources"
        self.retries = retries
        self.notes: dict[str, None] = {}
        self._lock = threading.Lock()
        self._pages: dict[str, list[Release] | IndexUnreachable] = {}

    @property
    def config(self) -> PipConfig:
        if self._config is None:
            self._config = pip_config()
        return self._config

    def release(self, project: str, version: str, *, online: bool = False) -> Release:
        """Return the wheel of a version.

        Args:
            online: Ignore the cache.

        Raises:
            SourceError: The index has no such wheel.
            IndexUnreachable: No index answers, and the cache has no wheel of this version.
        """
        try:
            listed = self._releases(project)
            try:
                return choose(project, version, listed)
            except SourceError:
                # A truncated page lists fewer files; a second answer may be complete.
                self._pages.pop(project, None)
                return choose(project, version, self._releases(project))
        except IndexUnreachable as error:
            cached = [] if online else map(parse_release, [folder.name for folder in self.cache.glob("*.whl")])
            own = [wheel for wheel in cached if wheel is not None and wheel.project == canonicalize_name(project)]
            try:
                release = choose(project, version, own)
            except SourceError:
                raise error from None
            self.notes[f"{error}; answered from the cache of wheels that were read before"] = None
            return release

    def versions(self, project: str) -> list[Version]:
        """Return a project's versions, oldest first, without yanked and nightly builds.

        Raises:
            SourceError: There is no version.
            IndexUnreachable: No index answers; the cache does not know what is new.
        """
        listed = self._releases(project)
        versions = {
            Version(wheel.version.public) for wheel in listed if not wheel.yanked and not wheel.version.is_devrelease
        }
        if not versions:
            raise _no_wheel(project)
        return sorted(versions)

    def released(self, project: str) -> list[str]:
        """Return all releases without pre-releases, oldest first; raises as `versions`."""
        return [str(version) for version in self.versions(project) if not version.is_prerelease]

    def newest(self, project: str) -> list[str]:
        """Return the newest release, and a newer pre-release if any.

        Raises as `versions`.
        """
        last = str(self.versions(project)[-1])
        return list(dict.fromkeys([*self.released(project)[-1:], last]))

    def _releases(self, project: str) -> list[Release]:
        with self._lock:
            if project not in self._pages:
                try:
                    self._pages[project] = self._fetch(project)
                except IndexUnreachable as error:
                    self._pages[project] = error
            known = self._pages[project]
        if isinstance(known, IndexUnreachable):
            raise known
        return known

    def _fetch(self, project: str) -> list[Release]:
        from ._remote import fetch_page

        urls = [self.config.index_url, *self.config.extra_index_urls]
        remote = [url for url in urls if url is None or host_of(url) is not None]
        if not remote:
            raise IndexUnreachable(
                "pip's index setting names no http(s) address; check it (pip config list), "
                "or name a wheel file or a folder"
            )
        wheels: list[Release | None] = []
        failures = []
        for url in remote:
            try:
                for file in fetch_page(url, project, self.config, self.retries):
                    digest = file.digests.get("sha256")
                    wheels.append(parse_release(file.filename, url=file.url, sha256=digest, yanked=file.is_yanked))
            except IndexUnreachable as error:
                failures.append(error)
        # As pip does, use the indexes that answer. Whether a version is missing is certain only if all answered.
        if failures and not wheels:
            raise failures[0]
        notes = (f"{error}; answered from the other indexes, which may lack a release" for error in failures)
        self.notes |= dict.fromkeys(notes)
        return [wheel for wheel in wheels if wheel is not None and wheel.project == canonicalize_name(project)]


class IndexSource:
    """A version on the package index; each member is fetched once, when it is read.

    Not thread-safe. The connection closes with the object.

    Args:
        version: A PEP 440 version.
        index: The index; None: the indexes of the user's pip.

    Raises:
        SourceError: See `Index.release`.
    """

    def __init__(self, version: str, index: Index | None = None, *, project: str = "vllm") -> None:
        self._index = index if index is not None else Index()
        self._release = self._index.release(project, version)
        self._folder = self._index.cache / self._release.filename
        self._zip: zipfile.ZipFile | None = None
        self._texts: dict[str, str | None] = {}
        self.label = self._release.filename
        self.version = str(self._release.version)

    def read(self, path: str) -> str | None:
        """Return a member's text with its line ends, or None.

        Raises:
            IndexUnreachable: The member is not cached, and the index does not answer.
            SourceError: The wheel is damaged.
        """
        if path not in self._members:
            return None
        if path not in self._texts:
            cached = self._cached(path)
            self._texts[path] = self._of_wheel(lambda wheel: self._fetched(wheel, path)) if cached is None else cached
        return self._texts[path]

    def _cached(self, path: str) -> str | None:
        try:
            data = (self._folder / "files" / path).read_bytes()
        except OSError:
            return None
        return decode(data, f"{self.label}: {path}") if (len(data), zlib.crc32(data)) == self._members[path] else None

    def _fetched(self, wheel: zipfile.ZipFile, path: str) -> str | None:
        if path not in self._members:
            return None
        text = member_text(wheel, path, self.label) if path in wheel.NameToInfo else ""
        if (len(data := text.encode()), zlib.crc32(data)) != self._members[path]:
            # The cached directory is another wheel's, or was damaged in transfer.
            with contextlib.suppress(OSError):
                (self._folder / _DIRECTORY).unlink()
            del self._members
            raise zipfile.BadZipFile(f"{path} is not what its directory stated")
        self._keep(f"files/{path}", text)
        return text

    def named(self, name: str) -> list[str]:
        """Return the paths of vLLM's files of this name."""
        return [path for path in self._members if path.startswith("vllm/") and path.endswith(f"/{name}")]

    def checksums(self) -> dict[str, int]:
        """Return each Python file's CRC-32 from the wheel's directory.

        It compares versions without reading files.
        """
        return {path: crc for path, (_, crc) in self._members.items()}

    @functools.cached_property
    def _members(self) -> dict[str, tuple[int, int]]:
        """Size and CRC-32 of each Python file, from the wheel's directory."""
        try:
            cached = json.loads((self._folder / _DIRECTORY).read_text(encoding="utf-8"))
            # A wheel of the same name with another digest is another wheel.
            if cached["format"] == _FORMAT and self._release.sha256 in (None, cached["sha256"]):
                return {name: (size, crc) for name, (size, crc) in cached["members"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        from ._remote import listing

        members = self._of_wheel(listing)
        record = {"format": _FORMAT, "sha256": self._release.sha256, "members": dict(sorted(members.items()))}
        self._keep(_DIRECTORY, json.dumps(record))
        return members

    def _keep(self, name: str, text: str) -> None:
        """Cache a text; on failure it is only downloaded again."""
        file = self._folder / name
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(file, text.encode())
        except OSError as error:
            self._index.notes[f"{self._folder}: downloads are not cached ({error.strerror or error})"] = None

    def _of_wheel(self, read: Callable[[zipfile.ZipFile], Out]) -> Out:
        """Return `read(wheel)`, and retry after a damaged answer."""
        # A retry opens the wheel over a new connection.
        from ._remote import Damaged, network, new_session, open_remote, read_again

        def once() -> Out:
            if self._zip is None:
                release = self._release
                if release.url is None:
                    release = self._index.release(release.project, self.version, online=True)
                session = new_session(self._index.config, self._index.retries)
                self._zip = open_remote(str(release.url), self.label, session)
            try:
                with network(self.label):
                    return read(self._zip)
            except Damaged:
                self._zip = None
                raise

        return read_again(once, self._index.retries)
