# SPDX-License-Identifier: Apache-2.0
"""The command ``gates``."""

from __future__ import annotations

import json

import pytest

from tests.program import program
from vllm_hwplugin.base import gates
from vllm_hwplugin.patching import load_catalogue


def test_lists_every_variable_with_the_value_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MUSA_DRAFT_FULL_WRAP", "0")
    monkeypatch.setenv("VLLM_HWPLUGIN_STRICT", "nonsense")
    result = program("gates")
    assert result.exit_code == 1
    rows = {line.split("\t")[0]: line.split("\t") for line in result.output.splitlines()}
    names = [gate.name for gate in (*gates.GATES, *load_catalogue().gates)]
    assert list(rows) == ["variable", *names]
    found = json.loads(program("gates", "--json").stdout)["gates"]
    assert [(row["name"], row["bad"]) for row in found] == [(name, name.endswith("_STRICT")) for name in names]
    assert rows["VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"][1:3] == ["off", "alias VLLM_MUSA_DRAFT_FULL_WRAP"]
    assert rows["VLLM_HWPLUGIN_STRICT"][1] == "invalid: nonsense"
    assert rows["VLLM_HWPLUGIN_NWOR_MODE"][1:3] == ["off", "default"]


@pytest.mark.parametrize("name", ["VLLM_HWPLUGIN_OPS_SKIP", "VLLM_HWPLUGIN_STRICT", "VLLM_MUSA_DRAFT_FULL_WRAP"])
@pytest.mark.parametrize("command", ["gates", "doctor"])
def test_no_value_floods_or_drives_the_terminal(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad, good and passed-over values alike."""
    monkeypatch.setenv("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "auto")
    monkeypatch.setenv(name, "\x1b[2Jforged: a line\n" + "x" * 100_000)
    result = program(command)
    assert len(result.output) < 50_000
    assert "\x1b" not in result.output
    assert not [line for line in result.output.splitlines() if line.startswith("x")]
