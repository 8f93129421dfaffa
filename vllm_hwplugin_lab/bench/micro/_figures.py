# SPDX-License-Identifier: Apache-2.0
"""Reading single figures of a results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import _op_cases
from ._cells import MEASURED, MISSING, REFUSED
from ._op_cases import OpCase


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


def op_ratio(results: Mapping[str, Any], case: OpCase) -> float | None:
    """vLLM's time by the plugin's; None where a side was not measured.

    vLLM's is the least over the ways of calling its operation (``OpCase.rivals``), all of which have to be measured.
    """
    ours, theirs = find(results, _op_cases.OURS, case.key), fastest(results, case.rivals, case.key)
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
