# SPDX-License-Identifier: Apache-2.0
"""The table at the end of ``bench attention`` and ``bench ops``: is the plugin's kernel faster here, and right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from . import _attention_cases as attention
from . import _op_cases as ops
from ._figures import find, op_ratio

_NONE = "-"


def summary(results: Mapping[str, Any]) -> Table:
    """Other kernels' times by the plugin's, so that more than 1 is a gain: geometric mean, least and most."""
    return _attention(results) if results["kind"] == "attention" else _ops(results)


def _attention(results: Mapping[str, Any]) -> Table:
    drawn = Table(title="time by the plugin's kernel: mean (least to most), shapes")
    for name in ("kernel", "prefill", "decode and verification", "worst error by SDPA's"):
        drawn.add_column(name, justify="left" if name == "kernel" else "right")
    groups = (attention.PREFILL, (*attention.DECODE, *attention.AS_SERVED))
    for name in dict.fromkeys(kernel for kernel, _ in attention.plan()):
        ratios = [
            [
                theirs["seconds"] / ours["seconds"]
                for case in group
                if (ours := find(results, attention.OURS, case.key)) is not None
                and (theirs := find(results, name, case.key)) is not None
            ]
            for group in groups
        ]
        errors = [cell["error_ratio"] for group in groups for c in group if (cell := find(results, name, c.key))]
        # Those at head size 256 have no figure on these shapes.
        if errors:
            drawn.add_row(name, *map(_spread, ratios), f"{max(errors):.2f}")
    return drawn


def _ops(results: Mapping[str, Any]) -> Table:
    drawn = Table(title="vLLM's time by the plugin's: mean (least to most), shapes")
    sizes = {size: [str(n) for n, one in ops.TOKENS.items() if one == size] for size in (ops.SMALL, ops.LARGE)}
    for name in ("operation", *(f"{', '.join(tokens)} tokens" for tokens in sizes.values()), "agrees"):
        drawn.add_column(name, justify="left" if name == "operation" else "right")
    for op in ops.OPS:
        cases = [case for case in ops.CASES.values() if case.op == op]
        cells = [cell for case in cases if (cell := find(results, ops.OURS, case.key)) is not None]
        if cells:
            known = [(case.size, ratio) for case in cases if (ratio := op_ratio(results, case)) is not None]
            spreads = (_spread([ratio for one, ratio in known if one == size]) for size in sizes)
            right = sum(cell["mismatch"] is None for cell in cells)
            drawn.add_row(op, *spreads, "yes" if right == len(cells) else f"{right} of {len(cells)}")
    return drawn


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return _NONE
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(ratios)}"
