"""The help of the lab's commands, on a narrow terminal."""

from __future__ import annotations

import re

import pytest
import typer

from tests.program import program
from vllm_hwplugin_lab.cli import bench


@pytest.mark.parametrize("words", [["bench"], *(["bench", name] for name in ("serve", "soak", "attention", "ops"))])
def test_every_options_name_is_whole_and_stands_once(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = program(*words, "--help")
    assert max(map(len, result.output.splitlines())) <= 80
    command = typer.main.get_command(bench.bench)
    command = command if len(words) == 1 else command.commands[words[1]]
    wanted = [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
    named = re.findall(r"^  (?:-h, )?(-\S+)(?: / (--\S+))?", result.output, re.MULTILINE)
    assert sorted(filter(None, sum(named, ()))) == sorted([*wanted, "--help"])
    assert (
        result.output.count(f"  vllm-hwplugin {' '.join(words)} ")
        + result.output.count(f"  vllm-hwplugin {' '.join(words)}\n")
        >= 2
    )
