# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin gates``: the environment variables and their values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from ..base import gates as table_of_gates
from ..base.errors import HwpluginError
from ..patching import load_catalogue
from ..patching.outside import FOLDERS, find_outside
from .output import STANDARD_OUTPUT, add_optional_json, as_objects, print_rows, write_json
from .parser import Parser
from .text import printable, shortened


def gates(arguments: Sequence[str]) -> int:
    """List the environment variables; return 1 if a value is invalid."""
    parser = Parser(
        "gates",
        "List the environment variables and their values.\n\nExit status 1: a value is invalid.",
        ["gates", "gates --json"],
    )
    add_optional_json(parser)
    options = parser.read(arguments)
    settings = _settings()
    values = [_value(value, settings.errors.get(name)) for name, value in settings.values.items()]
    rows = [
        (gate.name, *shown, gate.good_values, gate.help) for gate, shown in zip(settings.gates, values, strict=True)
    ]
    if options.json is not None:
        keys = ("name", "value", "source", "values", "help", "bad")
        objects = as_objects(keys, [(*row, row[0] in settings.errors) for row in rows])
        write_json({"format": 1, "gates": objects}, options.json)
    if options.json != STANDARD_OUTPUT:
        print_rows(("variable", "value", "from", "values", "what it does"), rows)
    for without_effect in settings.unknown():
        print(printable(without_effect, keep=""), file=sys.stderr)
    return int(bool(settings.errors))


def _settings() -> table_of_gates.Settings:
    """Read the environment with the features' switches."""
    # `doctor` reports problems of a catalogue.
    settings = table_of_gates.Settings()
    with contextlib.suppress(HwpluginError):
        own = load_catalogue()
        settings.read(own.gates)
        settings.read(find_outside(settings.values[FOLDERS].names, own).gates)
    return settings


def _value(value: table_of_gates.GateValue, error: table_of_gates.GateError | None) -> tuple[str, str]:
    """Return the value and its source."""
    if error is not None:
        # The table has a column of valid values.
        return f"invalid: {printable(shortened(error.raw), keep='')}", error.source
    shown = printable(shortened(table_of_gates.show(value.value, value.gate.kind)), keep="") or "not set"
    return shown, f"{value.source} ({value.conflict})" if value.conflict else value.source
