# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin gates``: the table of environment variables, for a reader and for the documentation."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import gates as table_of_gates
from ..errors import HwpluginError
from ..patching import load_catalogue
from ..patching.outside import find_outside
from .parser import FAILURE, Parser
from .text import printable, shortened, table


def gates(arguments: Sequence[str]) -> int:
    """List the environment variables with the values in force, or write or check their documentation page."""
    parser = Parser(
        "gates",
        "List the environment variables with the values in force, or write or check their documentation page.",
        ["gates", "gates --check docs/gates.md"],
    )
    page = parser.add_argument_group("the documentation page")
    page.add_argument("--markdown", metavar="FILE", type=Path, help="Write it there.")
    page.add_argument("--check", metavar="FILE", type=Path, help="Exit 1 if that file is not up to date.")
    options = parser.read(arguments)
    if options.markdown is None and options.check is None:
        return _list()
    written = 0 if options.markdown is None else _write(options.markdown)
    return written or (0 if options.check is None else _compare(options.check))


def _write(page: Path) -> int:
    try:
        page.write_text(table_of_gates.markdown(load_catalogue().gates), encoding="utf-8")
    except OSError as error:
        return _stop(f"{page} was not written: {error.strerror}")
    return 0


def _compare(page: Path) -> int:
    try:
        found = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return _stop(f"{page} cannot be read: {error}")
    expected = table_of_gates.markdown(load_catalogue().gates)
    if found == expected:
        return 0
    print(*difflib.unified_diff(found.splitlines(True), expected.splitlines(True), str(page), "gates/table.py"), sep="")
    return _stop(
        f"{page} is not what gates/table.py says; write it again with `vllm-hwplugin gates --markdown {page}`", 1
    )


def _list() -> int:
    """1 where a value is bad."""
    more = _of_catalogues()
    every = (*table_of_gates.GATES, *more)
    now = [_now(gate) for gate in every]
    rows = [(gate.name, *shown, gate.good_values, gate.help) for gate, (_, *shown) in zip(every, now, strict=True)]
    if sys.stdout.isatty():
        print(table(("variable", "value", "from", "values", "what it does"), rows))
    else:
        for row in rows:
            print(*row, sep="\t")
    for without_effect in table_of_gates.unknown(None, more):
        print(printable(str(without_effect), keep=""), file=sys.stderr)
    return int(any(bad for bad, *_ in now))


def _of_catalogues() -> tuple[table_of_gates.Gate, ...]:
    """The gates of features; doctor is the one to say what is wrong with a catalogue."""
    try:
        own = load_catalogue()
        return (*own.gates, *find_outside(os.environ, own).gates)
    except HwpluginError:
        return ()


def _now(gate: table_of_gates.Gate) -> tuple[bool, str, str]:
    """Whether its value is bad, the value, and where it comes from."""
    try:
        value = table_of_gates.read(gate)
    except table_of_gates.GateError:
        # The list is where a reader looks for the good values.
        source = table_of_gates.source(gate)
        raw = os.environ[gate.name if source == "environment" else source.removeprefix("alias ")]
        return True, f"bad value: {printable(shortened(raw), keep='')}", source
    shown = printable(shortened(table_of_gates.show(value.value, gate.kind)), keep="") or "not set"
    return False, shown, f"{value.source} ({value.conflict})" if value.conflict else value.source


def _stop(message: str, status: int = FAILURE) -> int:
    print(f"gates: {message}", file=sys.stderr)
    return status
