"""Reading the patches: list, show, diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin_workshop.cli import catalogues, patches

ADD = "vllm/v1/add.py"


def run(*arguments: str) -> Any:
    return program("patches", *arguments)


@pytest.fixture(autouse=True)
def catalogue(small_catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    for module in (patches, catalogues):
        monkeypatch.setattr(module, "load_catalogue", lambda: load_catalogue(small_catalogue))
    return small_catalogue


def test_diff(small_tree: Callable[..., Path]) -> None:
    """Byte for byte the change to this vLLM, at the lines where it is made here."""
    tree = small_tree()
    (tree / ADD).write_text("# one more line\n" + (tree / ADD).read_text())
    result = run("diff", "graphs", "--vllm", f"{tree}@0.33.0")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith(f"--- a/{ADD}")
    assert lines[1].startswith(f"+++ b/{ADD}")
    assert [line for line in lines[2:] if line.startswith(("-", "+"))] == ["-    return a + b", "+    return b + a"]
    assert lines[2].startswith("@@ -6,")
