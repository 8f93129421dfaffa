"""The program itself: its list of commands, lazy imports, and how failures are shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import program


@pytest.mark.parametrize(("arguments", "missing"), [(["bench"], "typer"), (["probe", "--help"], "rich")])
def test_a_command_without_its_extra_says_what_to_install(arguments: list[str], missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from vllm_hwplugin.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "pip install 'vllm-hwplugin[lab]'" in done.stderr


def test_the_plugins_and_the_workshops_commands_need_no_extra(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'click', 'requests', 'pypi_simple', 'remotezip', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from vllm_hwplugin.cli import run\n"
        "print([run(command.split()) for command in sys.argv[1:]], file=sys.stderr)\n"
    )
    (tmp_path / "vllm").mkdir()
    commands = ["doctor --json", "gates", "patches", "patches show nwor", "patches check --form"]
    commands += [f"drift {tmp_path}@0.33.0", f"patches diff nwor --vllm {tmp_path}@0.33.0"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 1, 1]"


@pytest.mark.parametrize("error", [KeyError("a\nfault\x1b[2J"), OSError(5, "Input/output error", "/a/b"), ValueError()])
def test_an_unexpected_error_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """1 would say that something was looked at and found wrong; a traceback is there for who asks."""

    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr("vllm_hwplugin.cli._gates.gates", fail)
    result = program("gates")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "\x1b" not in result.stderr
    result = program("--traceback", "gates")
    assert result.exit_code == 2
    assert "in fail" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line_and_status_2(arguments: list[str]) -> None:
    """Also where the text waits in a buffer until the process ends."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "vllm_hwplugin", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["gates", "--chekc"], ["gates", "x"], ["patches", "show"], ["bench", "--no"]])
def test_what_cannot_be_read_is_status_2(arguments: list[str]) -> None:
    result = program(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr
