# SPDX-License-Identifier: Apache-2.0
"""Reading single figures of a results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._cells import MEASURED


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
