# SPDX-License-Identifier: Apache-2.0
"""The `vllm-hwplugin` program: which commands there are, and how a failure is shown.

A command's module is imported only when that command runs: `drift` must work where neither vLLM nor torch is
installed, and `--help` should not wait for either.

Every command ends with 0 (as it should be), 1 (it looked, and something is wrong) or 2 (it could not tell). Scripts act
on 1, so nothing that went wrong on the way may end with it.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import HwpluginError
from .text import printable

# Name -> (module, its command function or typer app, line for --help). Those of the workshop and of the lab are named
# here and nowhere imported: the plugin needs neither.
COMMANDS = {
    "drift": (
        "vllm_hwplugin_workshop.cli.drift",
        "drift",
        "Check which patches fit which vLLM versions, without importing vLLM.",
    ),
    "patches": (
        "vllm_hwplugin.cli._patches",
        "app",
        "List the patches and their exact text changes; import and check others.",
    ),
    "doctor": (
        "vllm_hwplugin.cli._doctor",
        "app",
        "Show the host, vLLM, the gates and what is live in which process.",
    ),
    "gates": ("vllm_hwplugin.cli._gates", "gates", "List the environment variables and their values."),
    "demo": ("vllm_hwplugin_lab.cli.demo", "demo", "Run vLLM on tiny checkpoints, stock and patched, side by side."),
    "bench": ("vllm_hwplugin_lab.cli.bench", "bench", "Measure stock and patched vLLM in turn on this machine."),
    "probe": ("vllm_hwplugin_lab.cli.probe", "probe", "Run what the attention backends declare on this host's device."),
}

# Could not tell, as distinct from 1: looked, and something is wrong.
FAILURE = 2

# What ends a command in an orderly way. typer shows errors of usage, but does not export their class.
_UsageError: Any = typer.BadParameter.__base__
_ORDERLY = (typer.Exit, typer.Abort, _UsageError)


class _LazyGroup(TyperGroup):
    """A group that lists its commands from `COMMANDS` and imports the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][2])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _ORDERLY:
            raise
        except BrokenPipeError as error:
            # The reader has seen enough.
            raise typer.Exit(FAILURE) from error
        except SystemExit as end:
            if end.code != 1:
                raise
            # rich ends the process so when its reader has gone.
            raise typer.Exit(FAILURE) from end
        except Exception as error:
            _fail(error, ctx.params["with_traceback"])


def _fail(error: Exception, with_traceback: bool) -> NoReturn:
    if with_traceback:
        traceback.print_exception(error)
    elif isinstance(error, HwpluginError):
        # Its message says all there is to say, in one line a fault; a traceback would only hide it.
        typer.echo("error: " + printable(str(error)), err=True)
    elif isinstance(error, OSError):
        typer.echo("error: " + printable(str(error), keep=""), err=True)
    else:
        what = printable(f"{type(error).__name__}: {error}", keep="")
        typer.echo(f"error: unexpected {what}; `vllm-hwplugin --traceback COMMAND ...` shows where it arose", err=True)
    raise typer.Exit(FAILURE) from error


def load_command(name: str) -> Any:
    """Import a command's module and make its command."""
    module, attribute, _ = COMMANDS[name]
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(value: bool) -> None:
    if value:
        from vllm_hwplugin import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    with_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error arose, not only what it is.")
    ] = False,
) -> None:
    """Exact, versioned source patches for vLLM's speculative decoding.

    Every command ends with 0: as it should be; 1: something is wrong; 2: it could not tell.
    """


def _open_standard_streams() -> None:
    """Where one is closed (`>&-`) nobody reads, or there is nothing to read: the exit status is still asked for."""
    # In this order each gets the lowest number that is free, its own; else the next file that is opened would.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def main() -> NoReturn:
    """Run the program with the process's arguments, and end the process."""
    _open_standard_streams()
    status, trouble = None, None
    try:
        status = app(prog_name="vllm-hwplugin")
    except SystemExit as end:
        status = end.code
        # click ends with 1 where the reader of `--help` has gone.
        trouble = end.__context__ if isinstance(end.__context__, OSError) else None
    except OSError as error:
        # `--help` and `--version` write before there is a command whose errors are caught.
        trouble = error
    try:
        sys.stdout.flush()
    except OSError as error:
        # A full disk shows only now. Python would try once more at its end, and end with a status of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        trouble = error
    if trouble is not None:
        if trouble.errno != errno.EPIPE and status != FAILURE:
            typer.echo(f"error: standard output cannot be written ({trouble.strerror})", err=True)
        status = FAILURE
    sys.exit(status)
