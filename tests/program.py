"""The program in the tests' own process: what a command prints, and how it ends."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import pytest

from vllm_hwplugin.cli import run


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Terminal(io.StringIO):
    """A standard stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def program(*arguments: str, stdin: bytes = b"", terminal: bool = False) -> Ended:
    """Run `vllm-hwplugin` with these arguments, and with standard output on a terminal if that is asked for."""
    out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = run(arguments)
    return Ended(status, out.getvalue(), err.getvalue())
