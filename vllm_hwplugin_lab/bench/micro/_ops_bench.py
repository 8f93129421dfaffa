# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of one side's operation on one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _op_cases as cases
from . import _op_inputs, _op_kernels
from ._cells import Cell
from ._copies import Copies

#: Bytes that all sets of inputs of a cell may take.
_ROOM = 24 << 30


class OpsBench:
    def __init__(self, copies: Copies, seed: int) -> None:
        self._copies = copies
        self._random = torch.Generator(device=copies.device).manual_seed(seed)
        self._choice = torch.Generator().manual_seed(seed)
        self._missing: dict[tuple[str, str], str | None] = {}

    def missing(self, cell: Cell) -> str | None:
        key = (cell[0], cases.CASES[cell[1]].op)
        if key not in self._missing:
            self._missing[key] = _op_kernels.missing(*key)
        return self._missing[key]

    def refuses(self, cell: Cell) -> str | None:
        return None

    def measure(self, cell: Cell) -> dict[str, Any]:
        case = cases.CASES[cell[1]]
        run = _op_kernels.implementation(cell[0], case.op)
        count = self._copies.sets(case.bytes_moved, _ROOM)
        more = _op_kernels.trailing(run, len(case.arguments))
        sets = [_op_inputs.arguments(case, self._copies.device, self._random) for _ in range(count)]
        wrong = self._mismatch(cell[0], case, run, sets[0], more)
        calls = [_bound(run, [*_op_kernels.passed(cell[0], case, values), *more]) for values in sets]
        facts, _ = self._copies.compared(calls, case.bytes_moved)
        return {**facts, "mismatch": wrong}

    def _mismatch(
        self, kernel: str, case: cases.OpCase, run: Callable[..., Any], values: list[Any], more: list[None]
    ) -> str | None:
        chosen = _op_inputs.rows(case, self._choice)
        right = _op_inputs.on_cpu(case, values, chosen)
        _op_kernels.reference(case.op)(*right)
        run(*_op_kernels.passed(kernel, case, values), *more)
        return _op_inputs.mismatch(case, values, right, chosen, ours=kernel == cases.OURS)


def _bound(run: Callable[..., Any], values: list[Any]) -> Callable[[], Any]:
    return lambda: run(*values)
