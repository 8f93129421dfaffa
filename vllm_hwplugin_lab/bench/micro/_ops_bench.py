# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of one side's operation on one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from . import _op_cases as cases
from . import _op_inputs, _op_kernels, _timer
from ._cells import Cell
from ._copies import Copies
from ._timer import Effort, Timer, measure

#: Bytes that all sets of inputs of a cell may take.
_ROOM = 24 << 30


class OpsBench:
    def __init__(
        self, timer: Timer, copies: Copies, effort: Effort, l2_bytes: int | None, device: Any, seed: int
    ) -> None:
        self._timer, self._copies, self._effort, self._l2 = timer, copies, effort, l2_bytes
        self._device = device
        self._random = torch.Generator(device=device).manual_seed(seed)
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
        count = _timer.sets(case.bytes_moved, self._l2, _ROOM, self._effort)
        more = _op_kernels.trailing(run, len(case.arguments))
        sets = [_op_inputs.arguments(case, self._device, self._random) for _ in range(count)]
        wrong = self._mismatch(cell[0], case, run, sets[0], more)
        calls = [_bound(run, [*_op_kernels.passed(cell[0], case, values), *more]) for values in sets]
        done = measure(self._timer, calls, self._effort)
        return {
            **dataclasses.asdict(done.timing),
            "sets": count,
            "eager": done.eager,
            "mismatch": wrong,
            "copy_seconds": self._copies.seconds(case.bytes_moved),
        }

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
