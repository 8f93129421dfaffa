"""What the commands print on terminals of several widths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.program import program
from vllm_hwplugin.base import gates
from vllm_hwplugin.patching import load_catalogue

WIDTHS = (40, 60, 80, 100, 160)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["patches", "gates", "doctor -v"])
def test_no_name_is_cut_or_split(command: str, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    # `doctor` would show the engine that ran last on this host.
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path))
    lines = program(*command.split(), terminal=True).stdout.splitlines()
    names = {gate.name for gate in (*gates.GATES, *load_catalogue().gates)}
    features = {feature.id for feature in load_catalogue().features}
    if command == "patches":
        names = features
    elif command == "doctor -v":
        names |= features
    assert names <= {word for line in lines for word in re.split(r"[\s;:]+", line)}
    # A table of columns that are a few letters wide is hundreds of lines long.
    assert len(lines) < 400
