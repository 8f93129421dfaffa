# SPDX-License-Identifier: Apache-2.0
"""`drift` and `patches diff` on an installed vLLM of which something cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin_workshop.cli import catalogues, drift, patches

NOT_UTF8 = "# coding: latin-1\n# é\n".encode("latin-1")


def run(*arguments: str) -> Any:
    return program(*arguments)


@pytest.fixture
def site(
    small_tree: Callable[[], Path], small_catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The small vLLM, installed; its two features change a file each."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for module in (drift, patches, catalogues):
        monkeypatch.setattr(module, "load_catalogue", lambda: load_catalogue(small_catalogue))
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    folder = small_tree()
    (folder / "vllm/_version.py").write_text("__version__ = version = '0.33.0'\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _latin(site: Path) -> Path:
    file = site / "vllm/v1/add.py"
    file.write_bytes(NOT_UTF8 + file.read_bytes())
    return file


def _folder(site: Path) -> Path:
    file = site / "vllm/v1/add.py"
    file.unlink()
    file.mkdir()
    return file


@pytest.mark.parametrize("spoil", [_latin, _folder])
def test_a_file_that_cannot_be_read_is_named_and_the_other_feature_is_judged(
    site: Path, spoil: Callable[[Path], Path]
) -> None:
    assert run("drift").exit_code == 0
    file = spoil(site)
    result = run("drift")
    assert result.exit_code == 2
    assert "context: exact" in result.output
    assert f"graphs: could not read ({file} cannot be read" in result.output
    diff = run("patches", "diff", "graphs")
    assert (diff.exit_code, diff.stdout) == (2, "")
    assert f"{file} cannot be read" in diff.stderr
    assert run("patches", "diff", "context").exit_code == 0


def test_drift_of_one_file_outweighs_another_that_cannot_be_read(site: Path) -> None:
    _latin(site)
    (site / "vllm/v1/norm.py").write_text("")
    assert run("drift").exit_code == 1


@pytest.mark.parametrize(
    ("text", "words"), [(NOT_UTF8, "_version.py cannot be read"), (b"__version__ = 'dev'\n", "has version 'dev'")]
)
@pytest.mark.parametrize("command", [("drift",), ("patches", "diff", "graphs")])
def test_a_version_that_cannot_be_told_is_one_line_and_no_drift(
    site: Path, text: bytes, words: str, command: tuple[str, ...]
) -> None:
    (site / "vllm/_version.py").write_bytes(text)
    result = run(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
