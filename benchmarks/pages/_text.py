# SPDX-License-Identifier: Apache-2.0
"""Format figures as cells and lines of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.micro import attention_cases, bandwidth
from vllm_hwplugin_lab.bench.table import SIDE_NAMES

NONE = "-"


def paragraph(text: str) -> str:
    """Wrap a text to 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def item(text: str) -> str:
    """Return a text as an item of a list."""
    return textwrap.indent(paragraph(text), "  ").replace("  ", "- ", 1)


def missing(results: Mapping[str, Any], name_of: Callable[[Mapping[str, Any]], str], done: str) -> Iterator[str]:
    """Yield why a file lacks figures, as items of a list."""
    for case in results["cases"]:
        if case["stopped"] is not None:
            yield item(f"{name_of(case)}: {case['stopped']} ended it before everything was {done}.")
        for side, entry in case["sides"].items():
            if entry["error"]:
                yield item(f"{name_of(case)}, {SIDE_NAMES[side]}: failed ({entry['error']}).")


def row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def head(names: Sequence[str]) -> list[str]:
    return [row(names), row(["---"] * len(names))]


def memory(results: Mapping[str, Any], cell: Mapping[str, Any], moved: int) -> list[str]:
    """Return time, GB/s, and shares of the copy bandwidths."""
    # Of the bandwidth of the large copy, and of the time of a copy of as many bytes.
    share = moved / cell["seconds"] / bandwidth(results, cell)
    floor = NONE if cell["copy_seconds"] is None else f"{cell['copy_seconds'] / cell['seconds']:.0%}"
    return [us(cell), f"{moved / cell['seconds'] / 1e9:.0f}", f"{share:.0%}", floor]


def us(cell: Mapping[str, Any] | None) -> str:
    return NONE if cell is None else f"{cell['seconds'] * 1e6:.1f}"


def flops(cell: Mapping[str, Any] | None, case: attention_cases.AttentionCase) -> str:
    """Return time, TFLOP/s and error."""
    if cell is None:
        return NONE
    speed = case.flops / cell["seconds"] / 1e12
    return f"{cell['seconds'] * 1e3:.3f} ({speed:.0f}), {cell['error_ratio']:.2f}"


def escaped(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")


def table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [*head(names), *map(row, lines)]
