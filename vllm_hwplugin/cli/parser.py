# SPDX-License-Identifier: Apache-2.0
"""Commands, and the parser of their arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..base.errors import HwpluginError
from .text import printable

#: The command could not tell. 1 means: it looked, and something is wrong.
FAILURE = 2

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Run = Callable[[Sequence[str]], int]


class MissingExtra(HwpluginError):
    """A command needs a library from one of this package's extras."""


class Command(NamedTuple):
    """A command of the program.

    Attributes:
        module: Imported when the command runs, not before.
        function: Takes the arguments after the command's name and returns the exit status.
        about: One line for the help.
        extra: The extra of this package that installs the module's requirements; empty if it has none.
    """

    module: str
    function: str
    about: str
    extra: str = ""

    def load(self) -> Run:
        """Return the command's function; raise MissingExtra without its libraries."""
        try:
            function: Run = getattr(importlib.import_module(self.module), self.function)
        except ModuleNotFoundError as error:
            if not self.extra or str(error.name).startswith("vllm_hwplugin"):
                raise
            raise MissingExtra(
                f"this command needs {error.name}, which is not installed; "
                f"run: pip install 'vllm-hwplugin[{self.extra}]'"
            ) from error
        return function


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        # As the lab's commands write it.
        super().add_usage(usage, actions, groups, prefix or "Usage: ")

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and heading[:1].upper() + heading[1:])

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Names are not split at their hyphens.
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A command's parser; bad arguments end the process with `FAILURE` and one line.

    Args:
        name: The command's name; empty for the program itself.
        about: Paragraphs: what the command does, and its exit status.
        examples: Command lines without the program's name.
        commands: Commands that may follow the options.
    """

    def __init__(
        self, name: str, about: str, examples: Sequence[str], commands: Mapping[str, Command] | None = None
    ) -> None:
        width = max(map(len, commands or ("",)))
        below = [f"  {key:<{width}}  {command.about}" for key, command in (commands or {}).items()]
        below = ["Commands:", *below, ""] if below else []
        below += ["Examples:", *(f"  vllm-hwplugin {example}" for example in examples)]
        prog = f"vllm-hwplugin {name}".rstrip()
        super().__init__(
            prog=prog,
            usage=f"{prog} [OPTIONS] COMMAND ..." if commands else None,
            description="\n\n".join(textwrap.fill(paragraph, 78) for paragraph in about.split("\n\n")),
            epilog="\n".join(below),
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="Show this message and exit.")
        self._commands = commands or {}

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse options and arguments in any order."""
        return self.parse_intermixed_args(arguments)

    def choose(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, Callable[[], int] | None]:
        """Return the options before the command's name, and the command's call.

        The call is None if no command is named.
        """
        at = next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
        options = self.parse_args(arguments[:at])
        if at == len(arguments):
            return options, None
        name, rest = arguments[at], arguments[at + 1 :]
        if name not in self._commands:
            self.error(f"unknown command {name}; expected one of {', '.join(self._commands)}")
        return options, lambda: self._commands[name].load()(rest)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse ignores a full disk and a closed pipe.
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(FAILURE, f"error: {printable(message, keep='')}; see `{self.prog} --help`\n")
