"""What others have written is quoted, and moves no cursor, forges no line and commands no CI runner."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Ended, program
from tests.workshop.conftest import ADD
from vllm_hwplugin_workshop.cli import drift
from vllm_hwplugin_workshop.sources import Index, PipConfig

COMMANDS = "::error::x ##[set-output name=report;]$(x) \x1b[2J\r\x07 </details> `|`"
#: As TOML writes it, with a line that begins as a runner's command.
TEXT = json.dumps(f"{COMMANDS}\n::add-mask::x\n  ::set-output name=report::x")


@pytest.fixture
def catalogue(tmp_path: Path, add_feature: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue in which each text that its author chooses is hostile, for a vLLM that is hostile as well."""
    offline = PipConfig(index_url="http://127.0.0.1:9/simple")
    monkeypatch.setattr(drift, "Index", lambda: Index(offline, tmp_path / "cache", retries=0))
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "plugin"))
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "catalogue.toml").write_text('name = "acme"\n')
    before = f"    return a + b  # {COMMANDS[:40]}\x1b[2J\x07\n::warning::x\n"
    add_feature(folder, "fits", "ACME_FITS", "total = 0", "total = 1", versions=">=0.33,<0.34")
    add_feature(
        folder,
        "drifts",
        "ACME_DRIFTS",
        before,
        "    return 1\n",
        pristine=ADD.replace("    return a + b\n", before),
        versions=">=0.33,<0.34",
        extra=f'[[not_needed]]\nversions = "<0.33"\nreason = {TEXT}\n',
    )
    texts = re.compile("^(title|what|origin|removal) = .*$", re.MULTILINE)
    for file in folder.glob("*/patch.toml"):
        file.write_text(texts.sub(lambda found: f"{found[1]} = {TEXT}", file.read_text()))
    return folder


@pytest.fixture
def tree(small_tree: Callable[[], Path]) -> Path:
    folder = small_tree()
    text = ADD.replace("    return a + b\n", f"    return a - b  # {COMMANDS}\n::error::y\n")
    (folder / "vllm/v1/add.py").write_bytes(text.encode())
    return folder


def is_inert(ended: Ended) -> bool:
    text = ended.stdout + ended.stderr
    return "##[" not in text and not any(
        line.lstrip().startswith("::") or not line.replace("\t", "").isprintable() for line in text.split("\n")
    )


@pytest.mark.parametrize("version", ["0.33.0", "0.34.0", "0.32.0"])
def test_drift(catalogue: Path, tree: Path, tmp_path: Path, version: str) -> None:
    page = tmp_path / "page.md"
    command = ("drift", "--catalogue", str(catalogue), f"{tree}@{version}", "--markdown", str(page))
    shown, report = program(*command), program(*command, "--json", "-")
    assert is_inert(shown)
    assert is_inert(report)
    (target,) = json.loads(report.stdout)["targets"]
    assert len(target["features"]) == 2
    if version == "0.32.0":
        (item,) = (item for item in target["features"] if item["status"] == "not-needed")
        assert item["reason"] == json.loads(TEXT)
    text = page.read_text()
    assert len([line for line in text.splitlines() if line.startswith("| [")]) == 2
    assert all(line.count("|") == 3 for line in text.splitlines() if line.startswith("|"))
    # In a block of code it is a text; elsewhere it would end what the page folds away.
    outside = [line for line in text.splitlines() if not line.startswith("    ")]
    assert sum("</details>" in line for line in outside) == sum("<details>" in line for line in outside)


def test_the_other_commands(catalogue: Path, tree: Path, tmp_path: Path) -> None:
    target = f"{tree}@0.33.0"
    assert is_inert(program("patches", "check", str(catalogue), "--vllm", target))
    edited = program("patches", "edit", str(catalogue / "drifts"), "--vllm", target, "--into", str(tmp_path / "work"))
    assert edited.exit_code == 1
    assert is_inert(edited)
    diff = (catalogue / "drifts/drifts.diff").read_text()
    mail = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nSubject: [PATCH] {COMMANDS}\n\n::error::x\n---\n{diff}"
    made = program("patches", "import", "-", "--vllm", target, stdin=mail.encode())
    assert made.exit_code == 1
    assert is_inert(made)
    shown = program("patches", "diff", "draft-full-graph", "--vllm", f"{tree}@0.33.0")
    assert is_inert(shown)


def test_a_name_that_forges_a_line_is_refused(catalogue: Path, tree: Path) -> None:
    (catalogue / "fits/fits.diff").rename(catalogue / "fits" / "x\n::set-output name=report::evil\nq.diff")
    ended = program("drift", "--catalogue", str(catalogue), f"{tree}@0.33.0")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "cannot be printed" in ended.stderr
    assert is_inert(ended)
