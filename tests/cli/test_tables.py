"""What the commands print on terminals of several widths."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from vllm_hwplugin import gates
from vllm_hwplugin.cli._app import app
from vllm_hwplugin.cli.tables import print_rows
from vllm_hwplugin.patching import load_catalog

WIDTHS = (40, 60, 80, 100, 160)


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *arguments: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(app, arguments)
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["patches", "gates", "doctor"])
def test_no_name_is_cut_or_split(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, width, command)
    names = {gate.name for gate in gates.GATES}
    features = {feature.id for feature in load_catalog().features}
    if command == "patches":
        names = features
    elif command == "doctor":
        names |= features
    assert names <= {word for line in lines for word in re.split(r"[\s│;:]+", line)}
    assert not [line for line in lines if "…" in line]
    assert not [line for line in lines if line[:1] in "┏│└" and len(line) > width]
    # A table of columns that are a few letters wide is hundreds of lines long.
    assert len(lines) < 400


@pytest.mark.parametrize("width", WIDTHS)
def test_every_verdict_of_drift_can_be_read(width: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    lines = on_terminal(monkeypatch, width, "drift", f"{tmp_path}@0.33.0")
    words = {word for line in lines for word in re.split(r"[\s│:]+", line)}
    assert {"0.33.0", "target", "missing"} <= words
    for feature in load_catalog().features:
        # In a heading a name may go on in the next line, behind its hyphens.
        assert {feature.id} <= words or set(re.findall(r"[^-]+-?", feature.id)) <= words
    assert not [line for line in lines if "…" in line]


def test_what_is_left_of_the_width_goes_to_prose() -> None:
    screen = io.StringIO()
    rows = [[Text("a-name-that-is-long"), Text("words " * 12)], [Text("b"), Text("")]]
    print_rows(Console(file=screen, width=60), "", ("name", "what"), rows)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert len([line for line in lines if "words" in line]) == 3
