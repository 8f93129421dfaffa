# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of one side's operation on one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _op_cases as cases
from . import _op_inputs, _op_kernels
from ._timer import Copies, Timer

#: Bytes that all sets of inputs of a cell may take.
_ROOM = 24 << 30


class OpsBench:
    def __init__(self, timer: Timer, copies: Copies, seed: int) -> None:
        self._timer, self._copies = timer, copies
        self._random = torch.Generator(device=timer.device).manual_seed(seed)
        self._choice = torch.Generator().manual_seed(seed)

    def measure(self, kernel: str, key: str) -> dict[str, Any]:
        """The time and the parity of a cell.

        Raises:
            Missing: the operation has no kernel on this side.
        """
        case = cases.CASES[key]
        run = _op_kernels.implementation(kernel, case.op)
        count = self._timer.sets(case.bytes_moved, _ROOM)
        more = _op_kernels.trailing(run, len(case.arguments))
        sets = [_op_inputs.arguments(case, self._timer.device, self._random) for _ in range(count)]
        wrong = self._mismatch(kernel, case, run, sets[0], more)
        calls = [_bound(run, [*_op_kernels.passed(kernel, case, values), *more]) for values in sets]
        facts, _ = self._timer.measure(calls)
        return {**facts, "copy_seconds": self._copies.seconds(case.bytes_moved), "mismatch": wrong}

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
