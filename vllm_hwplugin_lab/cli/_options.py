# SPDX-License-Identifier: Apache-2.0
"""What the commands share: how they are run, the option ``--json``, and checks of options' values."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, writable
from vllm_hwplugin.cli.parser import FAILURE, Run

_Settings = TypeVar("_Settings")

# What typer raises for options that it cannot read; it does not export the class.
_UsageError: Any = typer.BadParameter.__base__


def grouped(groups: Mapping[str, Sequence[str]], *examples: str, base: type[Any] = TyperCommand) -> type[Any]:
    """A class of command whose help has options in groups, with whole names at any width, and ends with examples.

    Its `typer.Typer` has ``rich_markup_mode=None``: rich's help cuts long names.

    Args:
        groups: heading -> names of the parameters below it; all others are "Options".
        examples: command lines.
        base: typer's class.
    """
    headings = {name: heading for heading, names in groups.items() for name in names}

    class Grouped(base):  # type: ignore[misc]
        def format_options(self, ctx: Any, formatter: Any) -> None:
            shown: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*groups, "Options")}
            for parameter in self.get_params(ctx):
                if record := parameter.get_help_record(ctx):
                    shown[headings.get(parameter.name, "Options")].append(record)
            for heading, records in shown.items():
                if records:
                    with formatter.section(heading):
                        formatter.write_dl(records)
            if isinstance(self, TyperGroup):
                self.format_commands(ctx, formatter)
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"  {example}\n")

    return Grouped


def runs(name: str, command: Callable[..., None] | typer.Typer, *examples: str) -> Run:
    """What the table of commands calls: takes a command's arguments and returns its exit status."""
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, cls=grouped({}, *examples))(command)
        command = app
    whole = typer.main.get_command(command)

    def run(arguments: Sequence[str]) -> int:
        try:
            status = whole.main(list(arguments), prog_name=f"vllm-hwplugin {name}", standalone_mode=False)
        except _UsageError as error:
            error.show()
            return FAILURE
        except SystemExit:
            # So the process would end where the reader of its output has gone.
            return FAILURE
        return status if isinstance(status, int) else 0

    return run


def writable_file(file: Path | None) -> Path | None:
    """The file that an option names, where it can be written.

    Raises:
        typer.BadParameter: it cannot.
    """
    try:
        return file and writable(str(file))
    except argparse.ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from error


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=writable_file, help="Write the results there; -: standard output."),
]


def console_for(json_file: Path | None) -> Console:
    """Where a command prints what is for a reader."""
    return Console(stderr=json_file == STANDARD_OUTPUT)


def known(values: list[str], good: tuple[str, ...], option: str) -> list[str]:
    """``values``, all of which have to be among ``good``.

    Raises:
        typer.BadParameter: one is not.
    """
    for value in values:
        if value not in good:
            raise typer.BadParameter(f"{value!r}; choose from {', '.join(good)}", param_hint=option)
    return values


def pairs(values: Iterable[str], option: str) -> dict[str, str]:
    """``KEY=VAL`` options as a dictionary.

    Raises:
        typer.BadParameter: one has no key or no equals sign.
    """
    found = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{value!r} is not KEY=VAL", param_hint=option)
        found[name] = setting
    return found


def arguments(values: Iterable[str], option: str) -> dict[str, Any]:
    """``KEY=VAL`` options as arguments of a function, each value as JSON where it is some.

    Raises:
        typer.BadParameter: one has no key or no equals sign.
    """
    found: dict[str, Any] = {}
    for name, text in pairs(values, option).items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name.replace("-", "_")] = value
    return found


def given(context: typer.Context, name: str) -> bool:
    """Whether the command line names an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def settings_of(kind: type[_Settings], context: typer.Context, **more: Any) -> _Settings:
    """A dataclass of what a command was asked for: its parameters of the fields' names, each value of a list once.

    Args:
        kind: the dataclass.
        context: of the command.
        more: outweighs the parameters.
    """
    once = {name: tuple(dict.fromkeys(one)) if isinstance(one, tuple) else one for name, one in context.params.items()}
    fields = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in {**once, **more}.items() if name in fields})
