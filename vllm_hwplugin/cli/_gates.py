# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin gates``: the environment variables with the values in force."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import gates as table_of_gates
from ..errors import HwpluginError
from ..patching import load_catalogue
from ..patching.outside import find_outside
from .output import STANDARD_OUTPUT, add_optional_json, as_objects, print_rows, write_json
from .parser import Parser
from .text import printable, shortened


def gates(arguments: Sequence[str]) -> int:
    """List the environment variables with the values in force; 1 where a value is bad."""
    parser = Parser(
        "gates",
        "List the environment variables with the values in force.\n\nExit 1 where a value is bad.",
        ["gates", "gates | grep -v default"],
    )
    add_optional_json(parser)
    options = parser.read(arguments)
    more = _of_catalogues()
    every = (*table_of_gates.GATES, *more)
    now = [_now(gate) for gate in every]
    rows = [(gate.name, *shown, gate.good_values, gate.help) for gate, (_, *shown) in zip(every, now, strict=True)]
    if options.json is not None:
        keys = ("name", "value", "source", "values", "help", "bad")
        found = as_objects(keys, [(*row, bad) for row, (bad, *_) in zip(rows, now, strict=True)])
        write_json({"format": 1, "gates": found}, options.json)
    if options.json != STANDARD_OUTPUT:
        print_rows(("variable", "value", "from", "values", "what it does"), rows)
    for without_effect in table_of_gates.unknown(None, more):
        print(printable(without_effect, keep=""), file=sys.stderr)
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
    except table_of_gates.GateError as error:
        # The list is where a reader looks for the good values.
        return True, f"bad value: {printable(shortened(error.raw), keep='')}", error.source
    shown = printable(shortened(table_of_gates.show(value.value, gate.kind)), keep="") or "not set"
    return False, shown, f"{value.source} ({value.conflict})" if value.conflict else value.source
