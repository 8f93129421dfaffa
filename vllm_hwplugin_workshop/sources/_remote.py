# SPDX-License-Identifier: Apache-2.0
"""Project pages of package indexes, and wheels on servers, read by byte ranges."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

from vllm_hwplugin.base.cachedir import LARGEST

from ._pip import PipConfig, host_of
from ._text import DAMAGE, IndexUnreachable, SourceError, one_line, too_large

try:
    import requests
    from pypi_simple import (
        PYPI_SIMPLE_ENDPOINT,
        DistributionPackage,
        NoSuchProjectError,
        PyPISimple,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
    )
    from remotezip import RemoteZip, RemoteZipError
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import HTTPError as TransportError
    from urllib3.exceptions import ProtocolError
    from urllib3.util.retry import Retry
except ImportError as error:
    raise IndexUnreachable(
        f"reading vLLM from a package index needs {error.name}, which is not installed; "
        "run: pip install 'vllm-hwplugin[workshop]'"
    ) from error

# Seconds to connect, and between bytes (pip's value); not for the whole transfer.
TIMEOUT = (5.0, 15.0)

# Seconds before the first retry after a damaged answer; doubled each time.
_PAUSE = 0.3

# The directory of a vLLM wheel takes 350 to 650 kB at the end of the file: one request reads it all.
_TAIL = 768 * 1024

Out = TypeVar("Out")


class Damaged(IndexUnreachable):
    """An answer is truncated or damaged; a retry may succeed."""


def read_again(read: Callable[[], Out], retries: int) -> Out:
    """Return `read()`, and retry with growing pauses while its answers are damaged.

    Raises:
        Damaged: The last answer is also damaged.
    """
    for number in range(retries):
        try:
            return read()
        except Damaged:
            time.sleep(_PAUSE * 2**number)
    return read()


class _Body:
    """The body of an answer with a size limit, because a server may send bytes forever."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._left = LARGEST

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def read(self, size: int | None = None, **options: Any) -> Any:
        return self._counted(self._body.read(self._left + 1 if size is None else min(size, self._left + 1), **options))

    def stream(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        return map(self._counted, self._body.stream(*arguments, **options))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise SourceError(too_large("an answer of the package index"))
        return data


def _limit(answer: requests.Response, **_: object) -> None:
    answer.raw = _Body(answer.raw)


def new_session(config: PipConfig, retries: int) -> requests.Session:
    """Return a session with pip's certificate and proxy settings, and retries."""
    session = requests.Session()
    # A silent server gets one retry; answered errors are often short. `Retry-After` is ignored: it may be an hour.
    again = Retry(
        total=retries,
        connect=1,
        read=1,
        backoff_factor=0.3,
        status_forcelist=(429, 500, 502, 503, 504),
        raise_on_status=False,
        respect_retry_after_header=False,
    )
    session.hooks["response"].append(_limit)
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=again))
    if config.cert is not None:
        session.verify = config.cert
    if config.proxy is not None:
        session.proxies = {"http": config.proxy, "https": config.proxy}
    return session


@contextmanager
def network(where: str) -> Iterator[None]:
    """Convert the libraries' errors to one message without addresses.

    Addresses may hold passwords.

    Raises:
        Damaged: The answer is truncated or damaged.
        IndexUnreachable: No answer, or a refusal.
    """
    try:
        yield
    except (
        requests.RequestException,
        TransportError,
        RemoteZipError,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
        *DAMAGE,
    ) as error:
        causes: list[BaseException] = [error]
        while (deeper := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(deeper)
        kind = Damaged if any(map(_is_damage, causes)) else IndexUnreachable
        cause = causes[-1]
        if isinstance(error, zipfile.BadZipFile):
            raise kind(f"{where}: not a readable wheel ({one_line(error)}); try another index") from error
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            answer = f"HTTP {cause.response.status_code} {cause.response.reason}"
        else:
            answer = getattr(cause, "strerror", None) or type(cause).__name__
        raise kind(
            f"{where}: no usable answer ({answer}); check the network and pip's index setting (pip config list), "
            "or name a wheel file or a folder"
        ) from error


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, requests.HTTPError):
        # The file has no such range: its directory, which stated the range, was damaged.
        return error.response is not None and error.response.status_code == 416
    if isinstance(error, (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)):
        return True
    # `requests` also raises ValueErrors for malformed addresses.
    return isinstance(error, (ProtocolError, *DAMAGE)) and not isinstance(error, requests.exceptions.InvalidURL)


def fetch_page(endpoint: str | None, project: str, config: PipConfig, retries: int) -> list[DistributionPackage]:
    """Return the files that an index lists for a project.

    Empty if the index does not know the project.

    Args:
        endpoint: The index's address; None: pip's built-in default, which pypi-simple shares.

    Raises:
        IndexUnreachable: No answer, or not an answer of a package index.
    """
    address = endpoint or PYPI_SIMPLE_ENDPOINT

    def read() -> list[DistributionPackage]:
        with network(str(host_of(address))):
            try:
                files: list[DistributionPackage] = (
                    PyPISimple(address, session=session).get_project_page(project, timeout=TIMEOUT).packages
                )
            except NoSuchProjectError:
                return []
            return files

    with new_session(config, retries) as session:
        return read_again(read, retries)


def open_remote(url: str, label: str, session: requests.Session) -> zipfile.ZipFile:
    """Open a wheel on a server that supports byte ranges.

    The directory has no checksum, so two requests read it, and both answers must agree.

    Raises:
        Damaged: The answer is damaged or not a zip archive.
        IndexUnreachable: No answer, or no support of ranges.
        SourceError: The directory is too large.
    """
    options = {"session": session, "timeout": TIMEOUT}
    with network(label):
        try:
            archive = RemoteZip(url, _TAIL, **options)
        except RemoteZipError:
            # Some servers support only ranges counted from the start.
            options["support_suffix_range"] = False
            archive = RemoteZip(url, _TAIL, **options)
        with RemoteZip(url, archive.size() - archive.start_dir, **options) as again:
            if _directory(again) != _directory(archive):
                raise zipfile.BadZipFile("its directory came in two texts")
    opened: zipfile.ZipFile = archive
    return opened


def _directory(archive: zipfile.ZipFile) -> list[tuple[object, ...]]:
    """Return the fields that reading a member depends on."""
    fields = attrgetter("filename", "header_offset", "compress_size", "compress_type", "flag_bits", "file_size", "CRC")
    return list(map(fields, archive.infolist()))


def listing(archive: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """Return size and CRC-32 of each Python file in a wheel."""
    return {info.filename: (info.file_size, info.CRC) for info in archive.infolist() if info.filename.endswith(".py")}
