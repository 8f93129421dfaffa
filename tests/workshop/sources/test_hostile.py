"""Servers, archives, folders and settings that are not what they should be: one line, bounded in time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_workshop.sources import (
    BadTree,
    BadWheel,
    Index,
    IndexSource,
    IndexUnreachable,
    PipConfig,
    TreeSource,
    UnknownVersion,
    WheelSource,
    _remote,
)

WriteWheel = Callable[..., Path]
VERSION = "__version__ = '0.33.0'\n"


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.fixture
def index(server: Any, tmp_path: Path) -> Index:
    return Index(server.config, tmp_path / "cache", retries=4)


@pytest.mark.parametrize(
    "name", ["vllm-0.33.0-1/../../../../out/x-py3-none-any.whl", "vllm-0.33.0-1\\..-py3-none-any.whl"]
)
def test_a_file_name_that_is_a_path_is_not_read(server: Any, index: Index, tmp_path: Path, name: str) -> None:
    """The names on an index's page become names of folders in the cache."""
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("vllm/_version.py", VERSION)
        archive.writestr("vllm-0.33.0.dist-info/METADATA", "Version: 0.33.0\n")
    server.wheels["wheel"] = (tmp_path / "wheel").read_bytes()
    server.page = f'<html><body><a href="/files/wheel">{name}</a></body></html>'.encode()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UnknownVersion):
        IndexSource("0.33.0", index).read("vllm/_version.py")
    assert "is no file name; not read" in index.notes[0]
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "cache"}


@pytest.mark.parametrize("ranges", ["all", "none", "file"])
def test_a_member_that_unpacks_to_gigabytes(
    server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel, ranges: str
) -> None:
    wheel = write_wheel(tmp_path / "w", "0.33.0", {"vllm/a.py": "\n" * (96 << 20), "vllm/_version.py": VERSION})
    server.add(wheel)
    server.ranges = ranges
    with memory_below(64 << 20), pytest.raises(BadWheel, match=r"vllm/a\.py has more than 16 MB"):
        (WheelSource(wheel) if ranges == "file" else IndexSource("0.33.0", index)).read("vllm/a.py")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_member_whose_stated_size_is_a_lie(tmp_path: Path, method: int) -> None:
    wheel = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    size = 96 << 20
    with zipfile.ZipFile(wheel, "w", method) as archive:
        archive.writestr("vllm/_version.py", VERSION)
        with archive.open("vllm/a.py", "w") as member:
            for _ in range(size >> 20):
                member.write(b"\n" * (1 << 20))
    wheel.write_bytes(wheel.read_bytes().replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    source = WheelSource(wheel)
    with memory_below(80 << 20), pytest.raises(BadWheel):
        source.read("vllm/a.py")


def test_a_page_without_an_end(server: Any, index: Index) -> None:
    server.mood = "endless"
    with pytest.raises(IndexUnreachable, match=r"no usable answer \(more than 16 MB"):
        IndexSource("0.33.0", index)
    assert server.bytes_sent < 32 << 20


def test_a_page_that_drips(server: Any, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent for long, so that only a limit for the whole ends it."""
    monkeypatch.setattr(_remote, "_PAGE_TIME", 0.5)
    server.mood = "drips"
    started = time.monotonic()
    with pytest.raises(IndexUnreachable, match="it was not whole after"):
        IndexSource("0.33.0", index)
    assert time.monotonic() - started < 5


def test_a_silent_server_is_asked_twice(server: Any, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "TIMEOUT", (1.0, 0.2))
    server.mood = "silent"
    with pytest.raises(IndexUnreachable, match=r"(?i)timed out"):
        IndexSource("0.33.0", index)
    assert len(server.requests) == 2


def test_a_server_does_not_say_how_long_it_is_waited_for(
    server: Any, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remote, "_LONGEST_PAUSE", 0.01)
    server.status, server.retry_after = 429, "3600"
    started = time.monotonic()
    with pytest.raises(IndexUnreachable, match="429"):
        IndexSource("0.33.0", index)
    assert time.monotonic() - started < 10
    assert len(server.requests) == 5


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_check_at_once(server: Any, tmp_path: Path) -> None:
    """Also while all connections wait for an answer."""
    server.mood = "silent"
    environment = {**os.environ, "PIP_INDEX_URL": server.url, "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "vllm_hwplugin", "drift", "--all"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.requests
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "address",
    [
        "http://user:hunter2/s3cr3t@127.0.0.1:9/simple",
        "user:s3cr3t@127.0.0.1:9/simple",
        "http://user:hunter2?s3cr3t@127.0.0.1:9/simple",
        "http://127.0.0.1:9/simple?token=s3cr3t",
        "http://[::1/s3cr3t",
        "http://user:s3cr3t@127.0.0.1:9/simple",
    ],
)
def test_no_address_gives_its_secret_away(tmp_path: Path, address: str) -> None:
    """Malformed ones above all: nobody can tell where the password ends."""
    for config in (PipConfig(index_url=address), PipConfig("http://127.0.0.1:9/", (address,))):
        with pytest.raises(IndexUnreachable) as caught:
            IndexSource("0.33.0", Index(config, tmp_path / "cache", retries=0))
        assert "s3cr3t" not in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["vllm/a.py", "vllm-0.33.0.dist-info/METADATA"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/_version.py").write_text(VERSION)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    code = (
        "import sys, pathlib; from vllm_hwplugin_workshop.sources import TreeSource; "
        "TreeSource(pathlib.Path(sys.argv[1])).read('vllm/a.py')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=20)
    assert f"BadTree: {tmp_path / name}: cannot be read (not a regular file)" in done.stderr


def test_metadata_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    metadata = tmp_path / "vllm-0.33.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_bytes(b"Version: 0.33.0\nAuthor: \xe9\n")
    with pytest.raises(BadTree, match=r"dist-info/METADATA: cannot be read"):
        TreeSource(tmp_path)
