# SPDX-License-Identifier: Apache-2.0
"""What commands there are, and how one reads its arguments."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..errors import HwpluginError
from .text import printable

#: Could not tell, as distinct from 1: looked, and something is wrong.
FAILURE = 2

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Run = Callable[[Sequence[str]], int]


class MissingExtra(HwpluginError):
    """A command needs a library that comes with an extra of this package."""


class Command(NamedTuple):
    """
    Attributes:
        module: is imported when the command runs, and not before.
        function: takes the arguments behind the command's name and returns the exit status.
        about: one line for the help.
        extra: has what the module needs besides the plugin.
    """

    module: str
    function: str
    about: str
    extra: str = ""

    def load(self) -> Run:
        """Import what runs it.

        Raises:
            MissingExtra: a library is not installed.
        """
        try:
            found: Run = getattr(importlib.import_module(self.module), self.function)
        except ModuleNotFoundError as error:
            if not self.extra or str(error.name).startswith("vllm_hwplugin"):
                raise
            raise MissingExtra(
                f"this command needs {error.name}, which is not installed; "
                f"run: pip install 'vllm-hwplugin[{self.extra}]'"
            ) from error
        return found


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        # As the measuring commands have it.
        super().add_usage(usage, actions, groups, prefix or "Usage: ")

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Names are not split at their hyphens.
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Of one command. What cannot be read ends the process with `FAILURE` and one line.

    Args:
        name: of the command; empty for the program itself.
        about: what it does and how it ends, in paragraphs.
        examples: a command each, without the program's name.
        commands: those that may follow its own options.
    """

    def __init__(
        self, name: str, about: str, examples: Sequence[str], commands: Mapping[str, Command] | None = None
    ) -> None:
        width = max(map(len, commands or ("",)))
        below = [f"  {key:<{width}}  {command.about}" for key, command in (commands or {}).items()]
        below = ["commands:", *below, ""] if below else []
        below += ["examples:", *(f"  vllm-hwplugin {example}" for example in examples)]
        prog = f"vllm-hwplugin {name}".rstrip()
        super().__init__(
            prog=prog,
            usage=f"{prog} [options] COMMAND ..." if commands else None,
            description="\n\n".join(textwrap.fill(paragraph, 78) for paragraph in about.split("\n\n")),
            epilog="\n".join(below),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._commands = commands or {}

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Options and arguments, in any order."""
        return self.parse_intermixed_args(arguments)

    def choose(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, Callable[[], int] | None]:
        """The options before a command's name, and what runs that command; None where no command is named."""
        at = next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
        options = self.parse_args(arguments[:at])
        if at == len(arguments):
            return options, None
        name, behind = arguments[at], arguments[at + 1 :]
        if name not in self._commands:
            self.error(f"no such command: {name}; there are: {', '.join(self._commands)}")
        return options, lambda: self._commands[name].load()(behind)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse ignores a disk that is full and a reader who has gone.
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(FAILURE, f"error: {printable(message, keep='')}; see `{self.prog} --help`\n")
