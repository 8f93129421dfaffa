# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``, single figures of it, and the table at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from .._host import Host
from .._results import provenance
from . import _attention_cases as attention
from . import _op_cases as ops
from ._supervise import MEASURED, MISSING, REFUSED


def find(results: Mapping[str, Any], kernel: str, case: str) -> Mapping[str, Any] | None:
    """A cell that was measured, or None."""
    for cell in results["cells"]:
        if (cell["kernel"], cell["case"], cell["status"]) == (kernel, case, MEASURED):
            return dict(cell)
    return None


def fastest(results: Mapping[str, Any], kernels: Sequence[str], case: str) -> Mapping[str, Any] | None:
    """The cell of the kernel that takes the least time, or None where one of them was not measured."""
    cells = [find(results, kernel, case) for kernel in kernels]
    known = [cell for cell in cells if cell is not None]
    return min(known, key=lambda cell: float(cell["seconds"])) if len(known) == len(cells) else None


def bandwidth(results: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """The copy bandwidth of the process that measured the cell, bytes a second."""
    return float(results["processes"][cell["process"]]["copy_bandwidth"])


def op_ratio(results: Mapping[str, Any], case: ops.OpCase) -> float | None:
    """vLLM's time by the plugin's; None where a side was not measured.

    vLLM's is the least over the ways of calling its operation (``OpCase.rivals``), all of which have to be measured.
    """
    ours, theirs = find(results, ops.OURS, case.key), fastest(results, case.rivals, case.key)
    return None if ours is None or theirs is None else float(theirs["seconds"] / ours["seconds"])


def left_out(results: Mapping[str, Any]) -> list[str]:
    """What has no figure and why, each reason once, and what is wrong; what a kernel never claimed is no part of it."""
    reasons: dict[tuple[str, str, str], int] = {}
    for cell in results["cells"]:
        if cell["status"] in (MEASURED, REFUSED):
            continue
        # The operation matters where one side lacks some of them; a shape does not.
        kernel = cell["kernel"] + (f" {cell['case'].split()[0]}" if results["kind"] == "ops" else "")
        key = (kernel, cell["status"], cell["reason"] or "")
        reasons[key] = reasons.get(key, 0) + 1
    lines = [
        f"{kernel}: {status}{'' if status == MISSING else f' ({count} cells)'}: {reason}"
        for (kernel, status, reason), count in reasons.items()
    ]
    wrong = [cell for cell in results["cells"] if cell["status"] == MEASURED and cell.get("mismatch")]
    return lines + [f"{cell['kernel']} {cell['case']}: {cell['mismatch']}" for cell in wrong]


FORMAT = 2


def make_results(
    kind: str,
    host: Host,
    settings: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    processes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole file; ``kind`` is ``attention`` or ``ops``."""
    return {
        "kernels_format": FORMAT,
        "kind": kind,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": dict(settings),
        "processes": list(processes),
        "cells": list(outcomes),
    }


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
