"""A package index on this host, wheels to put on it, and a small vLLM with patches for it."""

from __future__ import annotations

import difflib
import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest
from packaging.utils import canonicalize_name

from vllm_hwplugin_workshop.sources import PipConfig

Hiccup = Literal["cut", "short", "zeros", "damaged", "closed"]

# A vLLM that is big enough for its members to lie outside the tail that is read first.
FILLER = {f"vllm/filler_{number}.bin": bytes([number]) * 700_000 for number in range(4)}


def _write_wheel(
    folder: Path,
    version: str,
    files: dict[str, str],
    *,
    build: str = "",
    platform: str = "manylinux_2_28_x86_64",
    metadata: str | None = "",
    project: str = "vllm",
    filler: bool = False,
) -> Path:
    """Write a wheel; `metadata` is the text of METADATA, made up when empty and left out when None."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{project}-{version}{f'-{build}' if build else ''}-cp38-abi3-{platform}.whl"
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        for path, data in FILLER.items() if filler else ():
            archive.writestr(zipfile.ZipInfo(path), data)
        if metadata is not None:
            text = metadata or f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
            archive.writestr(f"{project}-{version}.dist-info/METADATA", text)
    return folder / name


class _Http(ThreadingHTTPServer):
    """What a client does that goes before it has the whole answer is its own affair, and no traceback of a test."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class PackageServer:
    """A package index over HTTP.

    `ranges` is what it does with a range request: serves it, serves all but ranges counted from the end, or sends the
    whole file. `status` answers every request with that status. `hiccups` has what becomes of single answers, by their
    number from 0: sent in half, stated shorter than it is, of zeros, with the byte changed that is `damage_at` bytes
    from its end, or none at all.
    """

    def __init__(self) -> None:
        self.ranges: Literal["all", "from-start", "none"] = "all"
        self.status: int | None = None
        self.hiccups: dict[int, Hiccup] = {}
        self.damage_at = 1
        self.page: bytes | None = None
        self.page_type = "text/html"
        self.wheels: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.bytes_sent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def do_HEAD(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = _Http(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/simple/"

    @property
    def config(self) -> PipConfig:
        return PipConfig(index_url=self.url)

    def add(self, wheel: Path) -> None:
        self.wheels[wheel.name] = wheel.read_bytes()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        hiccup = self.hiccups.get(len(self.requests))
        self.requests.append((handler.command, handler.path, handler.headers.get("Range")))
        if hiccup == "closed":
            handler.close_connection = True
        elif self.status is not None:
            self._send(handler, self.status, b"")
        elif handler.path.startswith("/files/") and (name := handler.path.rpartition("/")[2]) in self.wheels:
            self._send_file(handler, self.wheels[name])
        elif (listing := self._listing(handler.path)) is not None:
            self._send(handler, 200, self.page if self.page is not None else listing, self.page_type)
        else:
            self._send(handler, 404, b"")

    def _listing(self, path: str) -> bytes | None:
        links = []
        for name, data in self.wheels.items():
            if path != f"/simple/{canonicalize_name(name.partition('-')[0])}/":
                continue
            digest = hashlib.sha256(data).hexdigest()
            links.append(f'<a href="/files/{name}#sha256={digest}">{name}</a>')
        if not links and path != "/simple/vllm/":
            return None
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def _send_file(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        wanted = handler.headers.get("Range")
        if wanted is None or self.ranges == "none":
            self._send(handler, 200, data)
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        if not start and self.ranges == "from-start":
            self._send(handler, 416, b"")
            return
        first = int(start) if start else max(0, len(data) - int(end))
        last = min(int(end), len(data) - 1) if start and end else len(data) - 1
        self._send(handler, 206, data[first : last + 1], extra=f"bytes {first}-{last}/{len(data)}")

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        kind: str = "application/octet-stream",
        extra: str | None = None,
    ) -> None:
        hiccup = self.hiccups.get(len(self.requests) - 1)
        if hiccup == "short":
            body = body[: len(body) // 2]
        elif hiccup == "zeros":
            body = bytes(len(body))
        elif hiccup == "damaged" and body:
            at = max(len(body) - self.damage_at, 0)
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        if extra is not None:
            handler.send_header("Content-Range", extra)
        handler.end_headers()
        if handler.command == "GET":
            sent = body[: len(body) // 2] if hiccup == "cut" else body
            handler.wfile.write(sent)
            self.bytes_sent += len(sent)


@pytest.fixture
def server() -> Iterator[PackageServer]:
    running = PackageServer()
    yield running
    running.close()


@pytest.fixture
def write_wheel() -> Callable[..., Path]:
    """`write_wheel(folder, version, files, ...)` writes a wheel and returns its path."""
    return _write_wheel


# A vLLM of two modules, and two features that each change one line of one of them.
ADD = """import os


def add(a, b):
    # Both numbers.
    total = 0
    del total
    return a + b
"""
NORM = """def norm(weight):
    return weight[0]
"""


@pytest.fixture
def small_tree(tmp_path: Path) -> Callable[[], Path]:
    """`small_tree()` writes the small vLLM (anew) and returns its folder."""

    def write() -> Path:
        folder = tmp_path / "tree"
        (folder / "vllm/v1").mkdir(parents=True, exist_ok=True)
        (folder / "vllm/__init__.py").write_text("")
        (folder / "vllm/v1/add.py").write_text(ADD)
        (folder / "vllm/v1/norm.py").write_text(NORM)
        return folder

    return write


def _add_feature(
    catalogue: Path,
    name: str,
    gate: str,
    before: str,
    after: str,
    *,
    path: str = "vllm/v1/add.py",
    pristine: str = ADD,
    versions: str = ">=0.20.0,<0.34.0",
    extra: str = "",
) -> None:
    patched = pristine.replace(before, after)
    lines = difflib.unified_diff(
        pristine.splitlines(keepends=True), patched.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    (catalogue / name).mkdir(parents=True)
    (catalogue / name / f"{name}.diff").write_text("".join(lines))
    (catalogue / name / "patch.toml").write_text(
        f'id = "{name}"\ntitle = "Change {name}"\ngate = "{gate}"\nwhat = "Why {name} changes."\n'
        f'origin = "a test"\nremoval = "never"\nrequires = []\nversions = "{versions}"\n{extra}\n'
    )


@pytest.fixture
def add_feature() -> Callable[..., None]:
    """`add_feature(catalogue, id, gate, before, after)` adds a feature that makes that change to the small vLLM."""
    return _add_feature


@pytest.fixture
def small_catalogue(tmp_path: Path) -> Path:
    """A folder of patches for the small vLLM."""
    catalogue = tmp_path / "patches"
    _add_feature(catalogue, "graphs", "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "    return a + b\n", "    return b + a\n")
    _add_feature(
        catalogue,
        "context",
        "VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM",
        "weight[0]",
        "weight",
        path="vllm/v1/norm.py",
        pristine=NORM,
        versions=">=0.26.0,<0.34.0",
        extra='[[not_needed]]\nversions = "<0.26.0"\nreason = "the fault came with 0.26.0"\n',
    )
    return catalogue
