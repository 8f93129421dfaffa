# SPDX-License-Identifier: Apache-2.0
"""Tables for terminals of any width: no word in them is ever cut or split, for words here are names and paths."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table_for(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table | None:
    """A table as wide as the console at most; None where the longest words of its columns do not fit side by side."""
    cells = [[heading, *(row[number].plain for row in rows)] for number, heading in enumerate(columns)]
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=1) for column in cells]
    most = [max((cell_len(line) for cell in column for line in cell.splitlines()), default=1) for column in cells]
    # A border and two blanks a column, and the last border.
    room = console.width - (3 * len(columns) + 1) - sum(least)
    if room < 0:
        return None
    widths = list(least)
    # Rich would shrink the widest columns first, also below their longest words.
    for left, number in enumerate(sorted(range(len(columns)), key=lambda n: most[n] - least[n])):
        more = min(most[number] - least[number], room // (len(columns) - left))
        widths[number] += more
        room -= more
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for heading, width in zip(columns, widths, strict=True):
        table.add_column(heading, width=width)
    for row in rows:
        table.add_row(*row)
    return table


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table, or, where the terminal is too narrow for it, a paragraph a row under the row's first cell."""
    table = table_for(console, title, columns, rows)
    if table is not None:
        console.print(table)
        return
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    for first, *others in rows:
        console.print(first, soft_wrap=True)
        named = [Text.assemble(f"{name}: ", cell) for name, cell in zip(columns[1:], others, strict=True) if cell]
        console.print(Text.assemble("  ", Text("; ").join(named)), soft_wrap=True)
