# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the commands: running them, the option ``--json``, and checks of values."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, writable
from vllm_hwplugin.cli.parser import FAILURE, Run

_Settings = TypeVar("_Settings")

# As argparse's parsers write them.
_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH"}

# typer's error for invalid options, which typer does not export.
_UsageError: Any = typer.BadParameter.__base__


def grouped(groups: Mapping[str, Sequence[str]], *examples: str, base: type[Any] = TyperCommand) -> type[Any]:
    """Return a class of command whose help has groups and examples.

    The help shows whole option names at any width. Its `typer.Typer` has ``rich_markup_mode=None``, because rich's help
    cuts long names.

    Args:
        groups: Heading -> names of its parameters; the rest are "Options".
    """
    headings = {name: heading for heading, names in groups.items() for name in names}

    class Grouped(base):  # type: ignore[misc]
        def format_options(self, ctx: Any, formatter: Any) -> None:
            shown: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*groups, "Options")}
            for parameter in self.get_params(ctx):
                if record := parameter.get_help_record(ctx):
                    names = re.sub(r"<(?:list\[)?(\w+)[^<]*>$", lambda kind: _METAVARS[kind[1]], record[0])
                    shown[headings.get(parameter.name, "Options")].append((names, record[1]))
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
    """Return a function that runs a command and returns its exit status."""
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, cls=grouped({}, *examples))(command)
        command = app
    whole = typer.main.get_command(command)
    whole.context_settings["help_option_names"] = ["-h", "--help"]

    def run(arguments: Sequence[str]) -> int:
        try:
            status = whole.main(list(arguments), prog_name=f"vllm-hwplugin {name}", standalone_mode=False)
        except _UsageError as error:
            error.show()
            return FAILURE
        except SystemExit:
            # typer exits if its output's reader has closed the pipe.
            return FAILURE
        return status if isinstance(status, int) else 0

    return run


def writable_file(file: Path | None) -> Path | None:
    """Return an option's file; raise typer.BadParameter if it cannot be written."""
    try:
        return file and writable(str(file))
    except argparse.ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from error


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=writable_file, help="Write the results to this file; -: standard output."
    ),
]


def console_for(json_file: Path | None) -> Console:
    """Return the console for the report."""
    return Console(stderr=json_file == STANDARD_OUTPUT)


def known(values: list[str], good: tuple[str, ...], option: str) -> list[str]:
    """Return ``values``; raise typer.BadParameter unless all are among ``good``."""
    for value in values:
        if value not in good:
            raise typer.BadParameter(f"{value!r}; choose from {', '.join(good)}", param_hint=option)
    return values


def pairs(values: Iterable[str], option: str) -> dict[str, str]:
    """Return ``KEY=VAL`` options as a dictionary; raise typer.BadParameter for others."""
    settings = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{value!r} is not KEY=VAL", param_hint=option)
        settings[name] = setting
    return settings


def arguments(values: Iterable[str], option: str) -> dict[str, Any]:
    """Return ``KEY=VAL`` options, values as JSON or text; raise as `pairs`."""
    settings: dict[str, Any] = {}
    for name, text in pairs(values, option).items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        settings[name.replace("-", "_")] = value
    return settings


def given(context: typer.Context, name: str) -> bool:
    """Whether the command line names an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def settings_of(kind: type[_Settings], context: typer.Context, **more: Any) -> _Settings:
    """Return a dataclass of settings from a command's parameters.

    Fields have the parameters' names; a list loses repeated values.

    Args:
        more: Overrides the parameters.
    """
    once = {
        name: tuple(dict.fromkeys(value)) if isinstance(value, tuple) else value
        for name, value in context.params.items()
    }
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in {**once, **more}.items() if name in fields})
