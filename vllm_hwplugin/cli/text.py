# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: tables, and escaped text of foreign origin (variables, run records, an index's answers)."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

# Nobody reads a longer value of a variable.
_LONGEST = 300

# GitHub's runner takes commands from a step's output: `::name ...::` at the start of a line, `##[name ...]` anywhere.
_COMMAND = re.compile(r"^([^\S\n]*:)(?=:)|#(?=#\[)", re.MULTILINE)

_COLOURS = {"red": 31, "green": 32, "yellow": 33}


def printable(text: str, keep: str = "\n") -> str:
    """Escape control characters other than ``keep``, and a CI runner's commands."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
    return _COMMAND.sub(lambda match: f"{match[0]}\\", text)


def shortened(text: str) -> str:
    """Return the text; of a long one its beginning and length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def ago(started: str) -> str:
    """Return the age of an ISO 8601 time: "41 min ago"."""
    passed = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(started)
    seconds = max(0, int(passed.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        # Below two of a unit the next smaller unit says more.
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def coloured(text: str, colour: Literal["red", "green", "yellow", ""]) -> str:
    """Colour a line for a terminal, unless ``NO_COLOR`` is set."""
    if not colour or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table that fits the terminal, without splitting words.

    Words are names and paths. If the longest words do not fit side by side, each row becomes a paragraph under its
    first cell. Where there is no terminal, each row is one line.
    """
    if not rows:
        return ""
    cells = list(zip(columns, *rows, strict=True))
    least = [max((len(word) for cell in column for word in cell.split()), default=1) for column in cells]
    most = [max(map(len, column)) for column in cells]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sum(most) + 2 * len(columns)
    room -= sum(least) + 2 * (len(columns) - 1)
    if room < 0:
        pairs = [[f"{name}: {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell] for row in rows]
        return "\n".join(f"{row[0]}\n  {'; '.join(pair)}" for row, pair in zip(rows, pairs, strict=True))
    widths = list(least)
    for left, at in enumerate(sorted(range(len(columns)), key=lambda at: most[at] - least[at])):
        more = min(most[at] - least[at], room // (len(columns) - left))
        widths[at] += more
        room -= more
    lines = []
    for row in (columns, ["-" * width for width in widths], *rows):
        wrapped = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*wrapped, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)
