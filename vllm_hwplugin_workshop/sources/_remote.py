# SPDX-License-Identifier: Apache-2.0
"""A package index's page of a project, and a wheel on a server, opened by byte ranges."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

from ._pip import PipConfig, host_of
from ._text import DAMAGE, IndexUnreachable, SourceError, one_line

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
    from urllib3.util.retry import Retry
except ImportError as error:
    raise IndexUnreachable(
        f"reading vLLM from a package index needs {error.name}, which is not installed; "
        "run: pip install 'vllm-hwplugin[workshop]'"
    ) from error

# Seconds: connecting, and each pause between bytes, not the whole transfer. The second is pip's own.
TIMEOUT = (5.0, 15.0)

# The directory of a vLLM wheel takes 350 to 650 kB at the end of the file: one request reads it all.
_TAIL = 768 * 1024


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
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=again))
    if config.cert is not None:
        session.verify = config.cert
    if config.proxy is not None:
        session.proxies = {"http": config.proxy, "https": config.proxy}
    return session


@contextmanager
def network(where: str) -> Iterator[None]:
    """Turn what the libraries raise into one message, without their own: those show whole addresses, with passwords."""
    try:
        yield
    except (
        requests.RequestException,
        TransportError,
        RemoteZipError,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
        ValueError,
    ) as error:
        cause: BaseException = error
        while (deeper := cause.__cause__ or cause.__context__) is not None:
            cause = deeper
        if isinstance(cause, requests.HTTPError) and cause.response is not None:
            found = f"HTTP {cause.response.status_code} {cause.response.reason}"
        else:
            found = getattr(cause, "strerror", None) or type(cause).__name__
        raise IndexUnreachable(
            f"{where}: no usable answer ({found}); check the network and pip's index setting (pip config list), "
            "or name a wheel file or a folder"
        ) from error


def fetch_page(endpoint: str | None, project: str, config: PipConfig, retries: int) -> list[DistributionPackage]:
    """The files that one index lists for a project; none where it does not know the project.

    Args:
        endpoint: the index's address; pip's built-in default, which pypi-simple shares, when None.

    Raises:
        IndexUnreachable: no answer, or not one of a package index.
    """
    address = endpoint or PYPI_SIMPLE_ENDPOINT
    with new_session(config, retries) as session, network(str(host_of(address))):
        try:
            found: list[DistributionPackage] = (
                PyPISimple(address, session=session).get_project_page(project, timeout=TIMEOUT).packages
            )
        except NoSuchProjectError:
            return []
        return found


def open_remote(url: str, label: str, session: requests.Session) -> zipfile.ZipFile:
    """Open a wheel on a server that serves byte ranges.

    Args:
        label: what to call it.

    Raises:
        IndexUnreachable: no answer, or an answer that is not the file.
        SourceError: the file is no zip archive.
    """
    options = {"session": session, "timeout": TIMEOUT}
    try:
        with network(label):
            try:
                archive: zipfile.ZipFile = RemoteZip(url, _TAIL, **options)
            except RemoteZipError:
                # Some servers only know ranges that are counted from the start.
                archive = RemoteZip(url, _TAIL, support_suffix_range=False, **options)
        return archive
    except DAMAGE as error:
        raise SourceError(f"{label}: not a readable wheel ({one_line(error)}); try another index") from error
