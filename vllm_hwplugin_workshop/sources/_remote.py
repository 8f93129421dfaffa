# SPDX-License-Identifier: Apache-2.0
"""A wheel on a server, opened as a zip archive by byte ranges, or whole where the server knows no ranges."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._background import within
from ._errors import BadWheel, IndexUnreachable, MissingTool
from ._limits import TooLarge, joined, unpacked
from ._pipconfig import PipConfig, shown
from ._wheel import DAMAGE

try:
    import requests
    from pypi_simple import (
        PYPI_SIMPLE_ENDPOINT,
        DistributionPackage,
        ProjectPage,
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
        "run: pip install 'vllm-hwplugin[workshop]'"
    ) from error

# Connecting and each pause between bytes, not the whole transfer. The second is pip's own.
TIMEOUT = (5.0, 15.0)

# Of a silent server, more attempts than this only take longer; an error that it answers with is often over soon.
_RETRIES_OF_SILENCE = 1

# Seconds. A server may ask for an hour, which nobody in front of a terminal would wait.
_LONGEST_PAUSE = 5.0

# Seconds for the whole page of an index, all attempts included: one that drips a byte at a time is never silent.
_PAGE_TIME = 45.0

# The directory of a vLLM wheel takes 350 to 650 kB at the end of the file: one request reads it all.
_TAIL = 768 * 1024

# In what libraries say of an address: user name and password, and the query, which may be a token.
_SECRETS = re.compile(r"(?<=//)[^/@\s]+@|\?[^\s'\")>]+")

# Answers to a range request that say "not this kind of range", rather than "not this file".
_RANGE_REFUSED = {400, 405, 416, 501}


class _Retry(Retry):
    def get_retry_after(self, response: Any) -> float | None:
        asked = super().get_retry_after(response)
        return None if asked is None else min(asked, _LONGEST_PAUSE)


def new_session(config: PipConfig, *, retries: int = 4) -> requests.Session:
    """A session with pip's certificate and proxy settings that tries again what a busy network drops."""
    session = requests.Session()
    silence = min(retries, _RETRIES_OF_SILENCE)
    adapter = HTTPAdapter(
        max_retries=_Retry(
            total=retries,
            connect=silence,
            read=silence,
            backoff_factor=0.3,
            status_forcelist=(429, 500, 502, 503, 504),
        )
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
            with network(shown(url)):
                return RemoteZip(url, _TAIL, session=session, support_suffix_range=suffix_range, timeout=TIMEOUT), False
        except RemoteIOError as error:
            refusal = error.__context__
            if not (
                isinstance(refusal, requests.HTTPError)
                and refusal.response is not None
                and refusal.response.status_code in _RANGE_REFUSED
            ):
                raise IndexUnreachable(unreachable(shown(url), error)) from error
        except RemoteZipError:
            # Ranges are ignored or answered in a way that cannot be used; another way of asking may do.
            continue
        except DAMAGE as error:
            raise BadWheel(f"{shown(url)}: not a readable wheel ({error}); try another index") from error
    return _download(url, session, digest), True


@contextmanager
def network(where: str) -> Iterator[None]:
    """Turn failures below the archive into one message; `remotezip` passes some of them on as they come."""
    try:
        yield
    except (requests.RequestException, TransportError) as error:
        raise IndexUnreachable(unreachable(where, error)) from error


def fetch_page(endpoint: str | None, project: str, config: PipConfig, retries: int) -> list[DistributionPackage]:
    """The files that one index lists for a project; none where it does not know the project.

    Args:
        endpoint: the index's address; pip's built-in default, which pypi-simple shares, when None.

    Raises:
        IndexUnreachable: no answer, or not one of a package index.
    """
    address = endpoint or PYPI_SIMPLE_ENDPOINT
    with new_session(config, retries=retries) as session:
        client = PyPISimple(address, session=session)
        try:
            with network(shown(address)):
                return within(_PAGE_TIME, lambda: _page(client, project, session))
        except (ValueError, TooLarge, TimeoutError, UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            raise IndexUnreachable(unreachable(shown(address), error)) from error


def _page(client: PyPISimple, project: str, session: requests.Session) -> list[DistributionPackage]:
    headers = {"Accept": client.accept}
    with session.get(client.get_project_url(project), headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 404:
            return []
        answer.raise_for_status()
        # In pieces that cannot unpack to more memory than there is; the page is then parsed as any answer is.
        answer.raw = io.BytesIO(joined(answer.raw.stream(4096, decode_content=True)))
        page: list[DistributionPackage] = ProjectPage.from_response(answer, project).packages
        return page


def member_bytes(archive: zipfile.ZipFile, name: str, label: str) -> bytes:
    """The bytes of a member, its check sum verified.

    Raises:
        IndexUnreachable: the connection failed in between.
        BadWheel: the member is damaged.
    """
    try:
        with network(label):
            return unpacked(archive, name)
    except RemoteZipError as error:
        raise IndexUnreachable(unreachable(label, error)) from error
    except TooLarge as error:
        raise BadWheel(f"{label}: {name} has {error}, as no file of vLLM; try another index") from error
    except DAMAGE as error:
        raise BadWheel(f"{label}: {name} is damaged ({error}); try another index") from error


def _download(url: str, session: requests.Session, digest: str | None) -> zipfile.ZipFile:
    # An anonymous file: it goes away with the archive object, also when the process is killed.
    whole = tempfile.TemporaryFile()  # noqa: SIM115
    seen = hashlib.sha256()
    try:
        with network(shown(url)), session.get(url, stream=True, timeout=TIMEOUT) as answer:
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


def unreachable(where: str, error: BaseException) -> str:
    """What to say of a failure; ``where`` is an address fit to be shown, or the name of a file."""
    cause: BaseException = error
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    if isinstance(cause, requests.HTTPError) and cause.response is not None:
        found = f"HTTP {cause.response.status_code} {cause.response.reason}"
    else:
        found = _SECRETS.sub("", " ".join(str(cause).split())) or type(cause).__name__
    return (
        f"{where}: no usable answer ({found}); check the network and pip's index setting (pip config list), "
        "or name a wheel file or a folder"
    )
