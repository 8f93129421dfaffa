# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin gates``: the table of environment variables, for a reader and for the documentation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .. import gates as table
from ..errors import HwpluginError
from ..patching import load_catalog
from ..patching.outside import find_outside
from ._app import FAILURE
from .tables import print_rows
from .text import printable, shortened


def gates(
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the documentation page there.")] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Exit 1 if that page is not up to date.")] = None,
) -> None:
    """List the environment variables with the values in force, or write or check their documentation page."""
    if markdown is not None:
        _write(markdown)
    if check is not None:
        _compare(check)
    if markdown is None and check is None:
        _list(Console())


def _write(page: Path) -> None:
    try:
        page.write_text(table.markdown(), encoding="utf-8")
    except OSError as error:
        raise _stop(f"{page} was not written: {error.strerror}") from None


def _compare(page: Path) -> None:
    try:
        found = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _stop(f"{page} cannot be read: {error}") from None
    expected = table.markdown()
    if found != expected:
        Console().print(
            "".join(
                difflib.unified_diff(found.splitlines(True), expected.splitlines(True), str(page), "gates/table.py")
            ),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise _stop(
            f"{page} is not what gates/table.py says; write it again with `vllm-hwplugin gates --markdown {page}`", 1
        )


def _list(console: Console) -> None:
    more = _of_catalogues()
    rows = [(gate, *_now(gate), gate.good_values, gate.help) for gate in (*table.GATES, *more)]
    _show_rows(rows, console)
    for without_effect in table.unknown(None, more):
        line = printable(str(without_effect), keep="")
        Console(stderr=True).print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _show_rows(rows: Sequence[tuple[table.Gate, str, str, str, str]], console: Console) -> None:
    if not console.is_terminal:
        for gate, *cells in rows:
            # Not through rich, which turns tabs into blanks.
            typer.echo("\t".join([gate.name, *cells]))
        return
    columns = ("variable", "value", "from", "values", "what it does")
    print_rows(
        console, "environment variables", columns, [[Text(gate.name), *map(Text, cells)] for gate, *cells in rows]
    )


def _of_catalogues() -> tuple[table.Gate, ...]:
    """The gates of catalogues from outside; doctor is the one to say what is wrong with these."""
    try:
        return find_outside(os.environ, load_catalog()).gates
    except HwpluginError:
        return ()


def _now(gate: table.Gate) -> tuple[str, str]:
    try:
        value = table.read(gate)
    except table.GateError:
        # The list is where a reader looks for the good values; doctor is the one to judge.
        return "(bad value)", table.source(gate)
    shown = printable(shortened(table.show(value.value, gate.kind)), keep="") or "not set"
    return shown, f"{value.source} ({value.conflict})" if value.conflict else value.source


def _stop(message: str, status: int = FAILURE) -> typer.Exit:
    Console(stderr=True).print(f"gates: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(status)
