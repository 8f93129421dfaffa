"""A vLLM on a package index: byte ranges, whole downloads, the cache, and everything that can fail."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_workshop.sources import Index, IndexSource, IndexUnreachable, PipConfig, SourceError, _remote
from vllm_hwplugin_workshop.sources._index import sources_folder

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
def test_which_files_differ_is_known_without_reading_them(server: Any, index: Index) -> None:
    found = IndexSource("0.33.0", index).checksums()
    assert found == {path: zlib.crc32(text.encode()) for path, text in FILES.items()}
    assert server.bytes_sent < 1_000_000


@pytest.mark.usefixtures("wheels")
def test_second_read_costs_one_look_at_the_index(server: Any, index: Index, tmp_path: Path) -> None:
    IndexSource("0.33.0", index).read("vllm/a.py")
    server.requests.clear()
    later = IndexSource("0.33.0", Index(server.config, tmp_path / "cache", retries=0))
    assert later.read("vllm/a.py") == "x = 1\r\n"
    assert later.read("vllm/nowhere.py") is None
    assert [path for _, path, _ in server.requests] == ["/simple/vllm/"]


@pytest.mark.usefixtures("wheels")
def test_only_what_was_read_is_kept(index: Index, tmp_path: Path) -> None:
    IndexSource("0.33.0", index).read("vllm/a.py")
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    kept = {file.relative_to(tmp_path / "cache" / NAME).as_posix() for file in files}
    assert kept == {"members.json", "files/vllm/a.py"}


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("damage", [b"x = 2\r\n", b"x", b""])
def test_damaged_cache_is_read_again(index: Index, tmp_path: Path, damage: bytes) -> None:
    """Altered (also to the same length), torn and empty files do not reach the engine."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    (tmp_path / "cache" / NAME / "files/vllm/a.py").write_bytes(damage)
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format": 2, "sha256": null, "members": {}}'])
def test_damaged_directory_is_read_again(index: Index, tmp_path: Path, damage: str) -> None:
    IndexSource("0.33.0", index).read("vllm/a.py")
    (tmp_path / "cache" / NAME / "members.json").write_text(damage)
    assert IndexSource("0.33.0", index).read("vllm/b.py") == "y = 2\n"


def test_other_wheel_of_the_same_name(
    server: Any, index: Index, wheels: Path, write_wheel: WriteWheel, tmp_path: Path
) -> None:
    """An index whose file has another digest does not get what another index's file held."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    server.add(write_wheel(wheels.parent, "0.33.0", FILES | {"vllm/a.py": "x = 3\n"}))
    assert IndexSource("0.33.0", Index(server.config, tmp_path / "cache")).read("vllm/a.py") == "x = 3\n"


@pytest.mark.usefixtures("wheels")
def test_cache_that_cannot_be_written(server: Any, tmp_path: Path) -> None:
    """Costs the keeping, not the answer, and is said."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    index = Index(server.config, tmp_path / "cache")
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"
    (note,) = index.notes
    assert "downloads are not kept" in note


@pytest.mark.usefixtures("wheels")
def test_server_without_ranges_from_the_end(server: Any, index: Index) -> None:
    server.ranges = "from-start"
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"
    assert server.bytes_sent < 1_000_000


@pytest.mark.usefixtures("wheels")
def test_server_without_ranges(server: Any, index: Index) -> None:
    """The wheel is read whole, once, and the user is told; a later question does not cost it again."""
    server.ranges = "none"
    assert IndexSource("0.33.0", index).read("vllm/a.py") == "x = 1\r\n"
    assert list(index.notes) == [f"{NAME}: the server has no byte ranges, so the whole wheel was downloaded"]
    server.requests.clear()
    assert IndexSource("0.33.0", index).read("vllm/b.py") == "y = 2\n"
    assert file_requests(server) == []


@pytest.mark.usefixtures("wheels")
def test_whole_download_is_checked_against_the_index(server: Any, index: Index) -> None:
    server.ranges = "none"
    server.lie_about_digest = True
    with pytest.raises(SourceError, match=r"SHA-256 is \w{64}, the index states 0{64}; try again or another index$"):
        IndexSource("0.33.0", index).read("vllm/a.py")


@pytest.mark.parametrize("ranges", ["all", "none"])
def test_truncated_wheel_on_the_server(server: Any, index: Index, wheels: Path, ranges: str) -> None:
    server.ranges = ranges
    server.wheels[NAME] = wheels.read_bytes()[:-200]
    with pytest.raises(SourceError, match=r"not a readable wheel \(.+\); try another index$"):
        IndexSource("0.33.0", index).read("vllm/a.py")


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("ranges", ["all", "none"])
def test_connection_that_breaks_off(server: Any, index: Index, ranges: str) -> None:
    source = IndexSource("0.33.0", index)
    server.ranges = ranges
    server.cut = 50_000
    with pytest.raises(SourceError, match=r"; (check the network|try another index)"):
        source.read("vllm/a.py")


@pytest.mark.usefixtures("wheels")
def test_wheel_that_went_away(server: Any, index: Index) -> None:
    source = IndexSource("0.33.0", index)
    server.wheels.clear()
    with pytest.raises(IndexUnreachable, match=r"no usable answer \(HTTP 404 Not Found\); check the network"):
        source.read("vllm/a.py")


@pytest.mark.parametrize(
    ("files", "metadata", "message"),
    [
        ({"other/a.py": ""}, "", "no vllm/ package in this wheel"),
        ({"vllm/a.py": ""}, None, "states no version"),
        ({"vllm/a.py": ""}, "Name: vllm\nVersion: 0.1.dev1\n", "states version 0.1.dev1 inside, 0.33.0 outside"),
    ],
)
def test_wheel_that_is_no_vllm(
    server: Any,
    index: Index,
    tmp_path: Path,
    write_wheel: WriteWheel,
    files: dict[str, str],
    metadata: str | None,
    message: str,
) -> None:
    server.add(write_wheel(tmp_path, "0.33.0", files, metadata=metadata))
    with pytest.raises(SourceError, match=message):
        IndexSource("0.33.0", index).read("vllm/a.py")


def test_member_name_that_leads_elsewhere(server: Any, index: Index, tmp_path: Path, write_wheel: WriteWheel) -> None:
    server.add(write_wheel(tmp_path, "0.33.0", {"vllm/../../../escaped.py": "x"}))
    with pytest.raises(SourceError, match="leads out of the wheel"):
        IndexSource("0.33.0", index).read("vllm/../../../escaped.py")
    assert not list(tmp_path.parent.rglob("escaped.py"))


@pytest.mark.usefixtures("wheels")
def test_unknown_version(index: Index) -> None:
    with pytest.raises(SourceError, match=r"^vllm 9\.9: the package index has no wheel of this version; .* 0\.33\.0$"):
        IndexSource("9.9", index)


def test_index_without_vllm(server: Any, index: Index) -> None:
    with pytest.raises(SourceError, match=r"lists no wheel of other; .*or name a wheel file"):
        IndexSource("1.0", index, project="other")


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(
        IndexUnreachable, match=r"^127\.0\.0\.1: no usable answer \(Connection refused\).*name a wheel file"
    ):
        IndexSource("0.33.0", offline(tmp_path))


@pytest.mark.usefixtures("wheels")
def test_no_network_after_the_first_time(index: Index, tmp_path: Path) -> None:
    """What was read once is answered, with a note; what was not still says why."""
    IndexSource("0.33.0", index).read("vllm/a.py")
    later = offline(tmp_path)
    source = IndexSource("0.33.0", later)
    assert source.read("vllm/a.py") == "x = 1\r\n"
    assert [note for note in later.notes if "answered from what was kept" in note]
    with pytest.raises(IndexUnreachable, match="no usable answer"):
        source.read("vllm/b.py")
    with pytest.raises(IndexUnreachable):
        IndexSource("0.32.0", later)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_index_that_refuses(server: Any, index: Index, status: int) -> None:
    server.status = status
    with pytest.raises(IndexUnreachable, match=rf"no usable answer \(.*{status}"):
        IndexSource("0.33.0", index)


def test_page_that_is_no_index(server: Any, index: Index) -> None:
    """A login page, say: it parses as HTML, and lists nothing."""
    server.page = b"<html><body>Please log in</body></html>"
    with pytest.raises(SourceError, match=r"lists no wheel of vllm; see whether it is the right one"):
        IndexSource("0.33.0", index)


@pytest.mark.usefixtures("wheels")
def test_extra_index(server: Any, tmp_path: Path) -> None:
    """As with pip, one index that does not answer does not hide another that does."""
    config = PipConfig(index_url="http://127.0.0.1:9/simple", extra_index_urls=("file:///nowhere", server.url))
    source = IndexSource("0.33.0", Index(config, tmp_path / "cache", retries=0))
    assert source.read("vllm/a.py") == "x = 1\r\n"


def test_only_file_addresses(tmp_path: Path) -> None:
    config = PipConfig(index_url="file:///opt/mirror")
    with pytest.raises(IndexUnreachable, match=r"names no http\(s\) address"):
        IndexSource("0.33.0", Index(config, tmp_path))


def test_password_is_not_shown_in_the_cause(server: Any, tmp_path: Path) -> None:
    """Libraries put the whole address into some of their messages."""
    server.page_type = "image/png"
    config = PipConfig(index_url=server.url.replace("//", "//user:secret@"))
    with pytest.raises(IndexUnreachable, match="no usable answer") as caught:
        IndexSource("0.33.0", Index(config, tmp_path, retries=0))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["vllm-0.33.0-1/../../../../out/x-py3-none-any.whl", "vllm-0.33.0-1\\..-py3-none-any.whl"]
)
def test_a_file_name_that_is_a_path_is_not_read(server: Any, index: Index, tmp_path: Path, name: str) -> None:
    """The names on an index's page become names of folders in the cache."""
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr("vllm/_version.py", FILES["vllm/_version.py"])
        archive.writestr("vllm-0.33.0.dist-info/METADATA", "Version: 0.33.0\n")
    server.wheels["wheel"] = (tmp_path / "wheel").read_bytes()
    server.page = f'<html><body><a href="/files/wheel">{name}</a></body></html>'.encode()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SourceError):
        IndexSource("0.33.0", index).read("vllm/_version.py")
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "cache"}


def test_a_silent_server_is_asked_twice(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "TIMEOUT", (1.0, 0.2))
    server.silent = True
    with pytest.raises(IndexUnreachable, match="no usable answer"):
        IndexSource("0.33.0", Index(server.config, tmp_path / "cache"))
    assert len(server.requests) == 2


def test_a_server_does_not_say_how_long_it_is_waited_for(server: Any, tmp_path: Path) -> None:
    server.status, server.retry_after = 429, "3600"
    started = time.monotonic()
    with pytest.raises(IndexUnreachable, match="429"):
        IndexSource("0.33.0", Index(server.config, tmp_path / "cache"))
    assert time.monotonic() - started < 10
    assert len(server.requests) == 5


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_check_at_once(server: Any, tmp_path: Path) -> None:
    """Also while all connections wait for an answer."""
    server.silent = True
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


def test_folder_follows_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "mine"))
    assert sources_folder() == tmp_path / "mine" / "sources"
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_folder_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that others may write to is passed over for the next one."""
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "open"))
    assert sources_folder() != tmp_path / "open" / "sources"


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "wheel"),
    [
        ("0.20.1", "vllm-0.20.1-1-cp38-abi3-manylinux_2_35_x86_64.whl"),
        ("0.23.0", "vllm-0.23.0-2-cp38-abi3-manylinux_2_28_x86_64.whl"),
    ],
)
def test_real_index(vllm_tree: Callable[[str], Any], version: str, wheel: str) -> None:
    """Versions of which there are several builds: the newest is read."""
    tree = vllm_tree(version)
    assert (tree.version, tree.label) == (version, wheel)
    assert f"'{version}'" in tree.read("vllm/_version.py")
