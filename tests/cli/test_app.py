"""The program itself: its list of commands, lazy imports, and how failures are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_hwplugin import __version__
from vllm_hwplugin.cli import _app
from vllm_hwplugin.gates import GateError
from vllm_hwplugin_workshop.sources import SourceError


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


@pytest.mark.parametrize("module", ["vllm_hwplugin", "vllm_hwplugin.cli"])
def test_module_runs_as_program(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("error", [KeyError("a\nfault\x1b[2J"), OSError(5, "Input/output error", "/a/b"), ValueError()])
def test_an_unexpected_error_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """1 would say that something was looked at and found wrong; a traceback is there for who asks."""

    def fail() -> None:
        raise error

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", fail)
    result = run("gates")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "\x1b" not in result.stderr
    result = run("--traceback", "gates")
    assert result.exit_code == 2
    assert "in fail" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["patches"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line_and_status_2(arguments: list[str]) -> None:
    """Also where the text waits in a buffer until the process ends."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vllm_hwplugin", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("argument", ["gates", "--help"])
def test_a_reader_who_leaves_is_not_a_finding(argument: str) -> None:
    """As in `vllm-hwplugin gates | head -1` with pipefail."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vllm_hwplugin", argument]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "closed", "status"),
    [("gates", ">&-", 0), ("drift no-such", ">&- 2>&-", 2), ("patches import - --into FOLDER --vllm none", "<&-", 2)],
)
def test_a_stream_that_is_closed_changes_no_exit_status(
    arguments: str, closed: str, status: int, tmp_path: Path
) -> None:
    arguments = arguments.replace("FOLDER", str(tmp_path / "new"))
    command = f'exec "{sys.executable}" -m vllm_hwplugin {arguments} {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == status
    assert "unexpected" not in done.stderr


def test_own_exit_status_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise typer.Exit(7)

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", end)
    assert run("gates").exit_code == 7
