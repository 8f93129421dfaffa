# SPDX-License-Identifier: Apache-2.0
"""A package index's page of a project, and a wheel on a server, opened by byte ranges."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm_hwplugin.cachedir import LARGEST

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

# Seconds: connecting, and each pause between bytes, not the whole transfer. The second is pip's own.
TIMEOUT = (5.0, 15.0)

# Seconds before a damaged answer is asked for again; doubled each time.
_PAUSE = 0.3

# The directory of a vLLM wheel takes 350 to 650 kB at the end of the file: one request reads it all.
_TAIL = 768 * 1024

Out = TypeVar("Out")


class Damaged(IndexUnreachable):
    """An answer was cut, or is not what was asked for: the next one may be whole."""


def read_again(read: Callable[[], Out], retries: int) -> Out:
    """Return `read()`; call it again after a growing pause while its answers are damaged.

    Raises:
        Damaged: the last answer was damaged, too.
    """
    for number in range(retries):
        try:
            return read()
        except Damaged:
            time.sleep(_PAUSE * 2**number)
    return read()


class _Body:
    """The body of an answer, with an end: a server may send bytes for ever."""

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
    """A session with pip's certificate and proxy settings that tries again what a busy network drops."""
    session = requests.Session()
    # Of a silent server a third attempt only takes longer; an error that it answers with is often over soon. It may ask
    # for a pause of an hour, which nobody in front of a terminal would wait.
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
    """Turn what the libraries raise into one message, without their own: those show whole addresses, with passwords.

    Raises:
        Damaged: an answer came, and not as it was sent or asked for.
        IndexUnreachable: no answer, or a refusal.
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
            found = f"HTTP {cause.response.status_code} {cause.response.reason}"
        else:
            found = getattr(cause, "strerror", None) or type(cause).__name__
        raise kind(
            f"{where}: no usable answer ({found}); check the network and pip's index setting (pip config list), "
            "or name a wheel file or a folder"
        ) from error


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, requests.HTTPError):
        # A range that the file does not have: its directory, which stated the range, came damaged.
        return error.response is not None and error.response.status_code == 416
    if isinstance(error, (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)):
        return True
    # `requests` makes ValueErrors of malformed addresses, too.
    return isinstance(error, (ProtocolError, *DAMAGE)) and not isinstance(error, requests.exceptions.InvalidURL)


def fetch_page(endpoint: str | None, project: str, config: PipConfig, retries: int) -> list[DistributionPackage]:
    """The files that one index lists for a project; none where it does not know the project.

    Args:
        endpoint: the index's address; pip's built-in default, which pypi-simple shares, when None.

    Raises:
        IndexUnreachable: no answer, or not one of a package index.
    """
    address = endpoint or PYPI_SIMPLE_ENDPOINT

    def read() -> list[DistributionPackage]:
        with network(str(host_of(address))):
            try:
                found: list[DistributionPackage] = (
                    PyPISimple(address, session=session).get_project_page(project, timeout=TIMEOUT).packages
                )
            except NoSuchProjectError:
                return []
            return found

    with new_session(config, retries) as session:
        return read_again(read, retries)


def open_remote(url: str, label: str, session: requests.Session) -> zipfile.ZipFile:
    """Open a wheel on a server that serves byte ranges.

    The directory has no check sum, so it is read by two requests, which must agree.

    Args:
        label: what to call it.

    Raises:
        Damaged: an answer that is not the file, or no zip archive.
        IndexUnreachable: no answer, or one without ranges.
        SourceError: the directory is too large to be read.
    """
    options = {"session": session, "timeout": TIMEOUT}
    with network(label):
        try:
            archive = RemoteZip(url, _TAIL, **options)
        except RemoteZipError:
            # Some servers only know ranges that are counted from the start.
            options["support_suffix_range"] = False
            archive = RemoteZip(url, _TAIL, **options)
        with RemoteZip(url, archive.size() - archive.start_dir, **options) as again:
            if _directory(again) != _directory(archive):
                raise zipfile.BadZipFile("its directory came in two texts")
    opened: zipfile.ZipFile = archive
    return opened


def _directory(archive: zipfile.ZipFile) -> list[tuple[object, ...]]:
    """All that reading a member goes by."""
    return [
        (
            info.filename,
            info.header_offset,
            info.compress_size,
            info.compress_type,
            info.flag_bits,
            info.file_size,
            info.CRC,
        )
        for info in archive.infolist()
    ]


def listing(archive: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """The size and CRC-32 of each Python file in a wheel."""
    return {info.filename: (info.file_size, info.CRC) for info in archive.infolist() if info.filename.endswith(".py")}
