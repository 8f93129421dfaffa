# SPDX-License-Identifier: Apache-2.0
"""A wheel on a server, opened as a zip archive by byte ranges, or whole where the server knows no ranges."""

from __future__ import annotations

import hashlib
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

from ._errors import BadWheel, IndexUnreachable, MissingTool
from ._pipconfig import PipConfig, shown
from ._wheel import DAMAGE

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
    from remotezip import RemoteIOError, RemoteZip, RemoteZipError
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import HTTPError as TransportError
    from urllib3.util.retry import Retry
except ImportError as error:
    raise MissingTool(
        f"reading vLLM from a package index needs {error.name}, which is not installed; "
        "run: pip install 'vllm-hwplugin[drift]'"
    ) from error

# Connecting and each pause between bytes, not the whole transfer.
TIMEOUT = (10.0, 60.0)

# The directory of a vLLM wheel takes 350 to 650 kB at the end of the file: one request reads it all.
_TAIL = 768 * 1024

_CREDENTIALS = re.compile(r"//[^/@\s]+@")

# Answers to a range request that say "not this kind of range", rather than "not this file".
_RANGE_REFUSED = {400, 405, 416, 501}


def new_session(config: PipConfig, *, retries: int = 4) -> requests.Session:
    """A session with pip's certificate and proxy settings that tries again what a busy network drops."""
    session = requests.Session()
    adapter = HTTPAdapter(
        max_retries=Retry(total=retries, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504))
    )
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    if config.cert is not None:
        session.verify = config.cert
    if config.proxy is not None:
        session.proxies = {"http": config.proxy, "https": config.proxy}
    return session


def open_remote(url: str, session: requests.Session, digest: str | None) -> tuple[zipfile.ZipFile, bool]:
    """Open a remote wheel.

    Args:
        digest: SHA-256 of the whole file, if the index states one. It can be checked only where the file is read
            whole; members read by ranges have their CRC-32.

    Returns:
        The archive, and whether it had to be downloaded whole.

    Raises:
        IndexUnreachable: no answer, or an answer that is not the file.
        BadWheel: the file is no zip archive, or not the one that the index means.
    """
    for suffix_range in (True, False):
        try:
            with network(url):
                return RemoteZip(url, _TAIL, session=session, support_suffix_range=suffix_range, timeout=TIMEOUT), False
        except RemoteIOError as error:
            refusal = error.__context__
            if not (
                isinstance(refusal, requests.HTTPError)
                and refusal.response is not None
                and refusal.response.status_code in _RANGE_REFUSED
            ):
                raise IndexUnreachable(unreachable(url, error)) from error
        except RemoteZipError:
            # Ranges are ignored or answered in a way that cannot be used; another way of asking may do.
            continue
        except DAMAGE as error:
            raise BadWheel(f"{shown(url)}: not a readable wheel ({error}); try another index") from error
    return _download(url, session, digest), True


@contextmanager
def network(url: str) -> Iterator[None]:
    """Turn failures below the archive into one message; `remotezip` passes some of them on as they come."""
    try:
        yield
    except (requests.RequestException, TransportError) as error:
        raise IndexUnreachable(unreachable(url, error)) from error


def fetch_page(endpoint: str | None, project: str, config: PipConfig, retries: int) -> list[DistributionPackage]:
    """The files that one index lists for a project; none where it does not know the project.

    Args:
        endpoint: the index's address; pip's built-in default, which pypi-simple shares, when None.

    Raises:
        IndexUnreachable: no answer, or not one of a package index.
    """
    address = endpoint or PYPI_SIMPLE_ENDPOINT
    with PyPISimple(address, session=new_session(config, retries=retries)) as client:
        try:
            with network(address):
                return client.get_project_page(project, timeout=TIMEOUT).packages
        except NoSuchProjectError:
            return []
        except (ValueError, UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            raise IndexUnreachable(unreachable(address, error)) from error


def member_bytes(archive: zipfile.ZipFile, name: str, label: str) -> bytes:
    """The bytes of a member, its check sum verified.

    Raises:
        IndexUnreachable: the connection failed in between.
        BadWheel: the member is damaged.
    """
    try:
        with network(label):
            return archive.read(name)
    except RemoteZipError as error:
        raise IndexUnreachable(unreachable(label, error)) from error
    except DAMAGE as error:
        raise BadWheel(f"{label}: {name} is damaged ({error}); try another index") from error


def _download(url: str, session: requests.Session, digest: str | None) -> zipfile.ZipFile:
    # An anonymous file: it goes away with the archive object, also when the process is killed.
    whole = tempfile.TemporaryFile()  # noqa: SIM115
    seen = hashlib.sha256()
    try:
        with network(url), session.get(url, stream=True, timeout=TIMEOUT) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_content(1 << 20):
                seen.update(chunk)
                whole.write(chunk)
        if digest is not None and seen.hexdigest() != digest:
            raise BadWheel(
                f"{shown(url)}: SHA-256 is {seen.hexdigest()}, the index states {digest}; try again or another index"
            )
        return zipfile.ZipFile(whole)
    except DAMAGE as error:
        whole.close()
        raise BadWheel(f"{shown(url)}: not a readable wheel ({error}); try another index") from error
    except BaseException:
        whole.close()
        raise


def unreachable(url: str, error: BaseException) -> str:
    cause: BaseException = error
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    if isinstance(cause, requests.HTTPError) and cause.response is not None:
        found = f"HTTP {cause.response.status_code} {cause.response.reason}"
    else:
        found = _CREDENTIALS.sub("//", " ".join(str(cause).split())) or type(cause).__name__
    return (
        f"{shown(url)}: no usable answer ({found}); check the network and pip's index setting (pip config list), "
        "or name a wheel file or a folder"
    )
