# SPDX-License-Identifier: Apache-2.0
"""The `vllm-hwplugin` program: which commands there are, and how a failure is shown.

A command's module is imported only when that command runs: `drift` must work where neither vLLM nor torch is
installed, and `--help` should not wait for either.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# Name -> (module in this package, its command function or typer app, line for --help).
COMMANDS = {
    "drift": ("_drift", "drift", "Check which patches fit which vLLM versions, without importing vLLM."),
    "patches": ("_patches", "app", "List the patches, and show the exact text change that one makes."),
    "doctor": ("_doctor", "doctor", "Show the host, vLLM, the gates and what is live in which process."),
    "gates": ("_gates", "gates", "List the environment variables and their values."),
    "demo": ("_demo", "demo", "Run vLLM on tiny checkpoints, stock and patched, side by side."),
    "bench": ("_bench", "bench", "Measure stock and patched vLLM in turn on this machine."),
    "probe": ("_probe", "probe", "Run what the attention backends declare on this host's device."),
}

# Errors whose message says all there is to say, so that a traceback would only hide it: (module, class).
_USER_ERRORS = (
    ("vllm_hwplugin.attention.probe", "ProbeError"),
    ("vllm_hwplugin.cli.sources", "SourceError"),
    ("vllm_hwplugin.gates", "GateError"),
    ("vllm_hwplugin.patching", "PatchingError"),
)

# Could not be done, as distinct from 1: was done, and the answer is no.
FAILURE = 2


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
        except Exception as error:
            if not _is_for_the_user(error):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(FAILURE) from error


def load_command(name: str) -> Any:
    """Import a command's module and make its command."""
    module, attribute, _ = COMMANDS[name]
    found = getattr(importlib.import_module(f".{module}", __package__), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


def _is_for_the_user(error: Exception) -> bool:
    # An error can only be of a class whose module was imported, so nothing has to be imported to ask.
    return any(
        isinstance(error, getattr(module, name))
        for module, name in ((sys.modules.get(module), name) for module, name in _USER_ERRORS)
        if module is not None
    )


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
) -> None:
    """Exact, versioned source patches for vLLM's speculative decoding."""


def main() -> None:
    """Run the program with the process's arguments."""
    app(prog_name="vllm-hwplugin")
