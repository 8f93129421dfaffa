"""A vLLM in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin_workshop.sources import SourceError, TreeSource


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "__version__ = version = '0.33.0'\n__version_tuple__ = version_tuple = (0, 33, 0)\n",
        '__version__ = "0.33.0"\n',
        "TYPE_CHECKING = False\n\n__version__: str = '0.33.0'\n",
    ],
)
def test_version_is_read_from_the_version_module(tmp_path: Path, text: str) -> None:
    """All spellings that setuptools-scm has used are known, and nothing of the module is run."""
    source = TreeSource(tree(tmp_path, {"vllm/_version.py": text.encode() + b"raise SystemExit\n"}))
    assert source.version == "0.33.0"


def test_metadata_outweighs_the_version_module(tmp_path: Path) -> None:
    files = {
        "vllm/_version.py": b"__version__ = '0.1.dev1'\n",
        "vllm-0.33.0rc1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0rc1\n\nVersion: 9\n",
    }
    assert TreeSource(tree(tmp_path, files)).version == "0.33.0rc1"


def test_unusable_metadata_falls_back_to_the_version_module(tmp_path: Path) -> None:
    files = {"vllm/_version.py": b"__version__ = '0.33.0'\n", "vllm-x.dist-info/METADATA": b"Version: dev\n"}
    assert TreeSource(tree(tmp_path, files)).version == "0.33.0"


def test_text_is_not_touched(tmp_path: Path) -> None:
    """Carriage returns and a missing final newline reach the engine as they are."""
    source = TreeSource(tree(tmp_path, {"vllm/a.py": "x = 'é'\r\ny".encode()}), "0.33.0")
    assert source.read("vllm/a.py") == "x = 'é'\r\ny"
    assert source.read("vllm/b.py") is None
    assert source.read("vllm/a.py/c.py") is None
    assert source.read("vllm") is None


def test_folder_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no vllm/ package in this folder; name the folder that holds vllm/"):
        TreeSource(tmp_path)


def test_version_not_written_down(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"its version is not written down .* name it: .*@0\.33\.0$"):
        TreeSource(tree(tmp_path, {"vllm/__init__.py": b""}))


def test_file_that_is_not_text(tmp_path: Path) -> None:
    source = TreeSource(tree(tmp_path, {"vllm/a.py": b"\xff\xfe"}), "0.33.0")
    with pytest.raises(SourceError, match=r"a\.py: cannot be read"):
        source.read("vllm/a.py")


def test_metadata_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    metadata = tmp_path / "vllm-0.33.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_bytes(b"Version: 0.33.0\nAuthor: \xe9\n")
    with pytest.raises(SourceError, match=r"dist-info/METADATA: cannot be read"):
        TreeSource(tmp_path)
