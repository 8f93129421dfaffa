"""The program itself: its list of commands, lazy imports, and how failures are shown."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_hwplugin import __version__
from vllm_hwplugin.cli import _app
from vllm_hwplugin.cli.sources import SourceError
from vllm_hwplugin.gates import GateError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(_app.app, arguments)


def test_help_lists_every_command_and_imports_none() -> None:
    """In a fresh process, so that what other tests imported does not count."""
    code = (
        "import sys\n"
        "sys.argv = ['vllm-hwplugin', '--help']\n"
        "from vllm_hwplugin.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    found = {'_drift', '_patches', '_doctor', '_gates', '_demo', '_bench'}\n"
        "    print('imported:', sorted(name for name in found if f'vllm_hwplugin.cli.{name}' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in _app.COMMANDS:
        assert f" {name} " in done.stdout
    assert "imported: []" in done.stdout


@pytest.mark.parametrize("name", list(_app.COMMANDS))
def test_every_command_can_be_loaded(name: str) -> None:
    assert _app.load_command(name).name == name


def test_module_runs_as_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_hwplugin.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


def test_unknown_command() -> None:
    result = run("drfit")
    assert result.exit_code == 2
    assert "No such command 'drfit'" in result.output


@pytest.mark.parametrize("kind", [SourceError, GateError])
def test_failure_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind("what, where; way out")

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", fail)
    result = run("gates")
    assert (result.exit_code, result.stderr) == (2, "error: what, where; way out\n")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program must not pass for one of its input."""

    def fail() -> None:
        raise KeyError("fault")

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", fail)
    assert isinstance(run("gates").exception, KeyError)


def test_own_exit_status_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise typer.Exit(7)

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", end)
    assert run("gates").exit_code == 7
