"""A vLLM on a package index: byte ranges, whole downloads, the cache, and everything that can fail."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_workshop.sources import Index, IndexSource, IndexUnreachable, PipConfig, SourceError, _remote
from vllm_hwplugin_workshop.sources._index import choose, parse_release

WriteWheel = Callable[..., Path]
FILES = {"vllm/a.py": "x = 1\r\n", "vllm/b.py": "y = 2\n", "vllm/_version.py": "__version__ = '0.33.0'\n"}
NAME = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def wheels(tmp_path: Path, write_wheel: WriteWheel, server: Any) -> Path:
    """One vLLM of 2.8 MB on the server."""
    wheel = write_wheel(tmp_path / "wheels", "0.33.0", FILES, filler=True)
    server.add(wheel)
    return wheel


@pytest.fixture
def index(server: Any, tmp_path: Path) -> Index:
    return Index(server.config, tmp_path / "cache", retries=0)


def offline(tmp_path: Path) -> Index:
    """An index on a port where nothing listens."""
    return Index(PipConfig(index_url="http://127.0.0.1:9/simple"), tmp_path / "cache", retries=0)


def file_requests(server: Any) -> list[str]:
    return [path for _, path, _ in server.requests if path.startswith("/files/")]


@pytest.mark.usefixtures("wheels")
def test_only_the_needed_bytes_are_read(server: Any, index: Index) -> None:
    source = IndexSource("0.33.0", index)
    assert (source.version, source.label) == ("0.33.0", NAME)
    assert file_requests(server) == []
    assert source.read("vllm/a.py") == "x = 1\r\n"
    assert source.read("vllm/nowhere.py") is None
    assert all(wanted is not None for command, path, wanted in server.requests if path.startswith("/files/"))
    assert server.bytes_sent < 1_000_000 < len(server.wheels[NAME])
    assert not index.notes


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("damage", [b"x = 2\r\n", b"x"])
def test_damaged_cache_is_read_again(index: Index, tmp_path: Path, damage: bytes) -> None:
    """Altered (also to the same length) and torn files do not reach the engine."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    (tmp_path / "cache" / NAME / "files/vllm/a.py").write_bytes(damage)
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"


def test_other_wheel_of_the_same_name(
    server: Any, index: Index, wheels: Path, write_wheel: WriteWheel, tmp_path: Path
) -> None:
    """An index whose file has another digest does not get what another index's file held."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    server.add(write_wheel(wheels.parent, "0.33.0", FILES | {"vllm/a.py": "x = 3\n"}))
    assert IndexSource("0.33.0", Index(server.config, tmp_path / "cache")).read("vllm/a.py") == "x = 3\n"


@pytest.mark.usefixtures("wheels")
def test_server_without_ranges_from_the_end(server: Any, index: Index) -> None:
    server.ranges = "from-start"
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"
    assert server.bytes_sent < 1_000_000


@pytest.mark.usefixtures("wheels")
def test_server_without_ranges(server: Any, index: Index) -> None:
    """No wheel of hundreds of megabytes is read whole for a few files."""
    server.ranges = "none"
    with pytest.raises(IndexUnreachable, match="or name a wheel file"):
        IndexSource("0.33.0", index).read("vllm/a.py")


@pytest.mark.parametrize("hiccup", ["cut", "short", "zeros", "damaged", "closed"])
def test_a_hiccup_at_any_request_costs_another_request(
    server: Any, tmp_path: Path, write_wheel: WriteWheel, monkeypatch: pytest.MonkeyPatch, hiccup: str
) -> None:
    """No answer is wrong, and none is missing: each byte of the directory and of the members counts."""
    monkeypatch.setattr(_remote, "_PAUSE", 0)
    server.add(write_wheel(tmp_path / "wheels", "0.33.0", FILES))

    def read() -> int:
        server.requests.clear()
        source = IndexSource("0.33.0", Index(server.config, tmp_path / f"cache-{hiccup}-{at}-{number}"))
        assert {path: source.read(path) for path in FILES} == FILES
        return len(server.requests)

    # Names, sizes, sums and offsets of all members are in the last 300 bytes.
    for at in range(1, 300, 9) if hiccup == "damaged" else (0,):
        server.hiccups, number = {}, -1
        least = read()
        # An index's page has no sum, and may name another wheel then.
        for number in range(hiccup == "damaged", least):
            server.hiccups, server.damage_at = {number: hiccup}, at
            assert read() >= least
        # Two in a row.
        server.hiccups = {1: hiccup, 2: hiccup}
        read()


def test_an_answer_without_an_end_is_not_read(server: Any, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "LARGEST", 1 << 20)
    server.page = b"<!DOCTYPE html>" + b" " * (2 << 20)
    with pytest.raises(SourceError, match="an answer of the package index has"):
        IndexSource("0.33.0", index)
    assert server.bytes_sent <= 3 << 20


@pytest.mark.usefixtures("wheels")
def test_no_network_after_the_first_time(index: Index, tmp_path: Path) -> None:
    """What was read once is answered, with a note; what was not still says why."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    later = offline(tmp_path)
    source = IndexSource("0.33.0", later)
    assert source.read("vllm/a.py") == "x = 1\r\n"
    assert [note for note in later.notes if "answered from the cache" in note]
    with pytest.raises(IndexUnreachable, match="no usable answer"):
        source.read("vllm/b.py")
    with pytest.raises(IndexUnreachable):
        IndexSource("0.32.0", later)


@pytest.mark.usefixtures("wheels")
def test_extra_index(server: Any, tmp_path: Path) -> None:
    """As with pip, one index that does not answer does not hide another that does."""
    config = PipConfig(index_url="http://127.0.0.1:9/simple", extra_index_urls=("file:///nowhere", server.url))
    index = Index(config, tmp_path / "cache", retries=0)
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"
    (note,) = index.notes
    assert "127.0.0.1" in note
    assert "answered from the other indexes" in note


def test_a_file_name_that_is_a_path_is_not_read(server: Any, index: Index, tmp_path: Path) -> None:
    """The names on an index's page become names of folders in the cache."""
    name = "vllm-0.33.0-1/../../../../out/x-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("vllm/_version.py", FILES["vllm/_version.py"])
    server.wheels["wheel"] = (tmp_path / "wheel").read_bytes()
    server.page = f'<html><body><a href="/files/wheel">{name}</a></body></html>'.encode()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SourceError):
        IndexSource("0.33.0", index).read("vllm/_version.py")
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "cache"}


@pytest.mark.parametrize(
    "address",
    [
        "http://user:hunter2/s3cr3t@127.0.0.1:9/simple",
        "user:s3cr3t@127.0.0.1:9/simple",
        "http://127.0.0.1:9/simple?token=s3cr3t",
        "http://[::1/s3cr3t",
    ],
)
def test_no_address_gives_its_secret_away(server: Any, tmp_path: Path, address: str) -> None:
    """Malformed ones above all: nobody can tell where the password ends. Libraries say the whole address."""
    server.page_type = "image/png"
    own = server.url.replace("//", "//user:s3cr3t@")
    for config in (PipConfig(address), PipConfig("http://127.0.0.1:9/", (address,)), PipConfig(own)):
        with pytest.raises(IndexUnreachable) as caught:
            IndexSource("0.33.0", Index(config, tmp_path / "cache", retries=0))
        assert "s3cr3t" not in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "wheels", "expected"),
    [
        # vLLM 0.20.1-1 exists beside a build without a tag, and differs in Python text.
        ("0.20.1", "0.20.1-cp38-abi3-x_x86_64 0.20.1-2-py3-none-any 0.20.1-10-py3-none-any 0.20.2-py3-none-any", 2),
        ("0.33.0", "0.33.0-cp38-abi3-x_aarch64 0.33.0-cp38-abi3-x_x86_64 0.33.0-cp38-abi3-macosx_11_0_arm64", 1),
        ("0.33.0", "0.33.0-1-cp38-abi3-x_aarch64 0.33.0-cp38-abi3-x_x86_64", 0),
        # A plain version finds local builds, as pip does; a local version finds only itself.
        ("0.33.0", "0.33.0+cu128-py3-none-any 0.33.0+cu129-py3-none-any", 1),
        ("0.33.0+cu128", "0.33.0+cu128-py3-none-any 0.33.0+cu129-py3-none-any", 0),
        ("0.33.0+cpu", "0.33.0+cu128-py3-none-any", None),
        ("0.34.0rc1", "0.34.0rc1-py3-none-any 0.33.0-py3-none-any", 0),
        ("0.34.0.dev5", "0.34.0.dev5+g123-py3-none-any", 0),
        ("0.34.0", "0.34.0rc1-py3-none-any 0.33.0-py3-none-any", None),
        # Yanked ones, only where there is nothing else.
        ("0.33.0", "0.33.0-1-py3-none-any! 0.33.0-py3-none-any", 1),
        ("0.33.0", "0.33.0-1-py3-none-any! 0.33.0-py3-none-any!", 0),
    ],
)
def test_which_wheel_stands_for_a_version(asked: str, wheels: str, expected: int | None) -> None:
    names = [f"vllm-{name.removesuffix('!')}.whl" for name in wheels.split()]
    known = [parse_release(name, yanked=text.endswith("!")) for name, text in zip(names, wheels.split(), strict=True)]
    for order in (known, known[::-1]):
        if expected is None:
            with pytest.raises(SourceError, match="the nearest are"):
                choose("vllm", asked, [one for one in order if one])
        else:
            assert choose("vllm", asked, [one for one in order if one]).filename == names[expected]
