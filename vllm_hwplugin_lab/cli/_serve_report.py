# SPDX-License-Identifier: Apache-2.0
"""The output of ``bench serve``: tables, the verdict, and a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_hwplugin.cli.output import write_text

from ..bench import running
from ..bench import serve as serving
from ..bench.table import SIDE_NAMES, of_loads
from ._sides import NO_BASELINE, show_verdicts

#: Widths in characters of a table's labels and of a column of figures.
_LABELS, _CELLS = 22, 15
#: Columns that fit on a narrow terminal.
_FEW = 5
_ONE = "only one server measured; compare two runs with --against FILE"
_NOTHING_SHARED = "no load has the same number of rounds before and after"


def show(results: Mapping[str, Any], console: Console, html: Path | None) -> bool:
    """Print tables and verdicts, write the page; return whether anything was measured."""
    verdicts = list(of_loads(results))
    groups = list(serving.groups(results))
    for name, loads in groups:
        console.print(name, style="bold", highlight=False)
        for text, columns, lines in serving.tables(loads):
            console.print(f"\n{text}", highlight=False)
            for table in _fitting(columns, lines, console.width):
                console.print(table)
    if groups:
        for side, entry in running.servers(results):
            console.print(f"{SIDE_NAMES[side]}: {running.in_words(entry)}.", highlight=False, soft_wrap=True)
        why = NO_BASELINE if "host" in results else _NOTHING_SHARED if "dates" in results else _ONE
        show_verdicts(verdicts, results.get("host", {}).get("device"), console, why)
    if groups and html is not None:
        from ..bench.report import page

        write_text(page(results, verdicts), html)
    return bool(groups)


def _fitting(columns: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yield the table, transposed and split if wider than the terminal."""
    whole, fit = len(columns) <= _FEW, max((width - _LABELS) // _CELLS, 1)
    for part in [lines] if whole else [lines[first : first + fit] for first in range(0, len(lines), fit)]:
        heads, *rows = [columns, *part] if whole else zip(columns, *part, strict=True)
        table = Table(*heads)
        for row in rows:
            table.add_row(*row)
        yield table
