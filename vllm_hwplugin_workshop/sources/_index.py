# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM, and of other distributions, read out of the wheels on the user's package index, not downloaded.

A wheel is a zip archive: its directory at the end and the few members that patches touch are read by range requests,
so that all versions together cost megabytes. What was read is kept in the user's cache, one folder a wheel file name:
`members.json` (what the wheel's directory says of each Python file: size and CRC-32) and the members that were read,
under their own paths. A kept member counts only while it agrees with its CRC, so a torn or altered file is fetched
again. These texts are compared with patches and never run.
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

from vllm_hwplugin.cachedir import own_folder, write_atomically

from ._pip import PipConfig, host_of, pip_config
from ._text import IndexUnreachable, SourceError, decode, member_text

_FORMAT = 1
_DIRECTORY = "members.json"

Out = TypeVar("Out")


class Release(NamedTuple):
    """One wheel on an index, or one that was read before: `url` is None then."""

    filename: str
    project: str
    version: Version
    build: tuple[int, str]
    is_x86: bool
    url: str | None = None
    sha256: str | None = None
    yanked: bool = False


def parse_release(filename: str, **more: Any) -> Release | None:
    """What a file name states; None for anything but a wheel, as of an index that gives a path for a name."""
    # It becomes the name of a folder in the cache, and `packaging` takes any text for a build tag.
    if re.fullmatch(r"[\w.!+-]+", filename) is None:
        return None
    try:
        project, version, build, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return None
    is_x86 = any(tag.platform == "any" or "x86_64" in tag.platform for tag in tags)
    return Release(filename, project, version, build or (-1, ""), is_x86, **more)


def choose(project: str, version: str, releases: Iterable[Release]) -> Release:
    """The wheel that stands for a version.

    As pip would: a version without local label also finds `+label` builds, and of several builds of one version
    (`0.20.1-1`) the newest counts, because a newer build may hold other Python text. What pip decides by the host is
    fixed here (x86_64, then the file name), so that the answer is the same everywhere: vLLM's Python files do not
    differ between platforms.

    Raises:
        SourceError: no wheel has this version.
    """
    known, wanted = list(releases), Version(version)
    matching = [
        one for one in known if wanted in (one.version, *([] if wanted.local else [Version(one.version.public)]))
    ]
    if matching:
        return max(matching, key=lambda one: (not one.yanked, one.version, one.build, one.is_x86, one.filename))
    versions = sorted({one.version for one in known})
    if not versions:
        raise _no_wheel(project)
    near = [*[one for one in versions if one < wanted][-2:], *[one for one in versions if one > wanted][:2]]
    raise SourceError(
        f"{project} {wanted}: the package index has no wheel of this version; the nearest are "
        f"{', '.join(map(str, near))}"
    )


def _no_wheel(project: str) -> SourceError:
    return SourceError(
        f"{project}: the package index lists no wheel of it; see whether it is the right one (pip config list), or "
        "name a wheel file or a folder"
    )


class Index:
    """The package indexes that pip is set up for.

    One project page is fetched once in the life of this object. Where no index answers, wheels that were read before
    still serve; `notes` then says so.

    Args:
        config: where to look; what pip says when None (asked on first use).
        cache: the folder to keep members in; the user's cache folder when None.
        retries: how often a request is tried again.

    Attributes:
        notes: what a user should know about how the answers came about, each once.
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
        """The wheel of a version.

        Args:
            online: only what the index says now, not what was kept.

        Raises:
            SourceError: the index answers, and has no such wheel.
            IndexUnreachable: no index answers, and no wheel of this version was read before.
        """
        try:
            listed = self._releases(project)
            try:
                return choose(project, version, listed)
            except SourceError:
                # A page that was cut lists fewer files; another answer may list them all.
                self._pages.pop(project, None)
                return choose(project, version, self._releases(project))
        except IndexUnreachable as error:
            kept = [] if online else map(parse_release, [folder.name for folder in self.cache.glob("*.whl")])
            own = [one for one in kept if one is not None and one.project == canonicalize_name(project)]
            try:
                found = choose(project, version, own)
            except SourceError:
                raise error from None
            self.notes[f"{error}; answered from what was kept of wheels that were read before"] = None
            return found

    def versions(self, project: str) -> list[Version]:
        """Of all its wheels, oldest first. Yanked wheels do not count, and neither do nightly builds.

        Raises:
            SourceError: there is none.
            IndexUnreachable: no index answers; what was kept says nothing of what is new.
        """
        listed = self._releases(project)
        found = {Version(one.version.public) for one in listed if not one.yanked and not one.version.is_devrelease}
        if not found:
            raise _no_wheel(project)
        return sorted(found)

    def released(self, project: str) -> list[str]:
        """All releases, oldest first, without pre-releases; raises as `versions`."""
        return [str(version) for version in self.versions(project) if not version.is_prerelease]

    def newest(self, project: str) -> list[str]:
        """The newest release, and behind it the newest pre-release where that is newer; raises as `versions`."""
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
                "pip's index setting names no http(s) address; see what it says (pip config list), "
                "or name a wheel file or a folder"
            )
        found: list[Release | None] = []
        failures = []
        for url in remote:
            try:
                for file in fetch_page(url, project, self.config, self.retries):
                    digest = file.digests.get("sha256")
                    found.append(parse_release(file.filename, url=file.url, sha256=digest, yanked=file.is_yanked))
            except IndexUnreachable as error:
                failures.append(error)
        # Like pip, answer from the indexes that do; but "no such version" is only sure when all of them did.
        if failures and not found:
            raise failures[0]
        told = (f"{error}; answered from the other indexes, which may lack a release" for error in failures)
        self.notes |= dict.fromkeys(told)
        return [one for one in found if one is not None and one.project == canonicalize_name(project)]


class IndexSource:
    """A vLLM version on the package index; nothing is fetched before it is asked for, and nothing twice.

    Use one object from one thread at a time. Its connection is closed with it.

    Args:
        version: a PEP 440 version.
        index: where to look; the user's pip configuration when None.
        project: `vllm`, or another distribution.

    Raises:
        SourceError: see `Index.release`.
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
        """The text of a member, newlines untouched; None where the wheel has no such member.

        Raises:
            IndexUnreachable: it is not kept, and the network does not give it.
            SourceError: the wheel is damaged.
        """
        if path not in self._members:
            return None
        if path not in self._texts:
            kept = self._kept(path)
            self._texts[path] = self._of_wheel(lambda wheel: self._fetched(wheel, path)) if kept is None else kept
        return self._texts[path]

    def _kept(self, path: str) -> str | None:
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
            # What was kept of the directory is not this wheel's, or came damaged.
            with contextlib.suppress(OSError):
                (self._folder / _DIRECTORY).unlink()
            del self._members
            raise zipfile.BadZipFile(f"{path} is not what its directory stated")
        self._keep(f"files/{path}", text)
        return text

    def checksums(self) -> dict[str, int]:
        """Each Python file's CRC-32, as the wheel's directory states it: which files differ, without reading them."""
        return {path: crc for path, (_, crc) in self._members.items()}

    @functools.cached_property
    def _members(self) -> dict[str, tuple[int, int]]:
        """The size and CRC-32 of each Python file, from the wheel's directory."""
        try:
            kept = json.loads((self._folder / _DIRECTORY).read_text(encoding="utf-8"))
            # A wheel of the same name with another digest is another wheel.
            if kept["format"] == _FORMAT and self._release.sha256 in (None, kept["sha256"]):
                return {name: (size, crc) for name, (size, crc) in kept["members"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        from ._remote import listing

        members = self._of_wheel(listing)
        record = {"format": _FORMAT, "sha256": self._release.sha256, "members": dict(sorted(members.items()))}
        self._keep(_DIRECTORY, json.dumps(record))
        return members

    def _keep(self, name: str, text: str) -> None:
        """A cache that cannot be written costs a second download, not the answer."""
        file = self._folder / name
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(file, text.encode())
        except OSError as error:
            self._index.notes[f"{self._folder}: downloads are not kept ({error.strerror or error})"] = None

    def _of_wheel(self, read: Callable[[zipfile.ZipFile], Out]) -> Out:
        """What `read` finds in the wheel; one that came damaged is opened again, over another connection."""
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
