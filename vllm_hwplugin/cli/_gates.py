# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin gates``: the environment variables with the values in force."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from .. import gates as table_of_gates
from ..errors import HwpluginError
from ..patching import load_catalogue
from ..patching.outside import FOLDERS, find_outside
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
    settings = _settings()
    now = [_now(value, settings.errors.get(name)) for name, value in settings.values.items()]
    rows = [(gate.name, *shown, gate.good_values, gate.help) for gate, shown in zip(settings.gates, now, strict=True)]
    if options.json is not None:
        keys = ("name", "value", "source", "values", "help", "bad")
        found = as_objects(keys, [(*row, row[0] in settings.errors) for row in rows])
        write_json({"format": 1, "gates": found}, options.json)
    if options.json != STANDARD_OUTPUT:
        print_rows(("variable", "value", "from", "values", "what it does"), rows)
    for without_effect in settings.unknown():
        print(printable(without_effect, keep=""), file=sys.stderr)
    return int(bool(settings.errors))


def _settings() -> table_of_gates.Settings:
    """Read the environment with the gates of features; doctor is the one to say what is wrong with a catalogue."""
    settings = table_of_gates.Settings()
    with contextlib.suppress(HwpluginError):
        own = load_catalogue()
        settings.read(own.gates)
        settings.read(find_outside(settings.values[FOLDERS].names, own).gates)
    return settings


def _now(value: table_of_gates.GateValue, fault: table_of_gates.GateError | None) -> tuple[str, str]:
    """Return the value and where it comes from."""
    if fault is not None:
        # The list is where a reader looks for the good values.
        return f"bad value: {printable(shortened(fault.raw), keep='')}", fault.source
    shown = printable(shortened(table_of_gates.show(value.value, value.gate.kind)), keep="") or "not set"
    return shown, f"{value.source} ({value.conflict})" if value.conflict else value.source
