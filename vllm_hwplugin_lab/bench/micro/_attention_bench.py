# SPDX-License-Identifier: Apache-2.0
"""``bench attention`` on the device: the time and the error of one kernel on one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import _accuracy
from . import _attention_cases as cases
from ._attention_inputs import Pool
from ._attention_kernels import AttentionKernel, FlashAttention, FlashInfer, Ours, Triton
from ._cells import Cell
from ._copies import Copies
from ._torch_kernels import prefill_kernels


def kernels() -> dict[str, AttentionKernel]:
    every: tuple[AttentionKernel, ...] = (
        Ours(),
        Ours(triton=True),
        *prefill_kernels(),
        Triton(),
        FlashAttention(cases.FA3, 3, 256),
        FlashAttention(cases.FA3_CONTIGUOUS, 3, 256, paged=False),
        FlashAttention(cases.FA4, 4, 512),
        FlashInfer(),
    )
    return {kernel.name: kernel for kernel in every}


class AttentionBench:
    """Measures cells over one pool of keys and values.

    Args:
        pool_elements: of the keys alone; cases that need more are refused.
    """

    def __init__(
        self,
        copies: Copies,
        seed: int,
        pool_elements: int,
        rivals: Mapping[str, AttentionKernel] | None = None,
    ) -> None:
        self._copies = copies
        self._pool = Pool(pool_elements, copies.device, seed)
        self._kernels = dict(rivals) if rivals is not None else kernels()
        self._missing: dict[str, str | None] = {}
        self._batches: tuple[str, Any, Any] | None = None

    def missing(self, cell: Cell) -> str | None:
        if cell[0] not in self._missing:
            self._missing[cell[0]] = self._kernels[cell[0]].missing()
        return self._missing[cell[0]]

    def refuses(self, cell: Cell) -> str | None:
        case = cases.CASES[cell[1]]
        if not self._pool.sets(case):
            return f"the cache of {self._pool.elements} elements that fits this device has no room for it"
        return self._kernels[cell[0]].refuses(case)

    def measure(self, cell: Cell) -> dict[str, Any]:
        case = cases.CASES[cell[1]]
        batches, answers = self._inputs(case)
        kernel = self._kernels[cell[0]]
        calls = [kernel.prepare(batch) for batch in batches]

        def spoil() -> None:
            for batch in batches:
                batch.output.fill_(torch.nan)

        facts, output = self._copies.compared(calls, case.kv_bytes, spoil)
        return {**facts, "error_ratio": _accuracy.ratio(answers, batches[-1], output)}

    def _inputs(self, case: cases.AttentionCase) -> tuple[Any, Any]:
        """The kernels of a case come one after the other: its inputs and its right answer are made once."""
        if self._batches is None or self._batches[0] != case.key:
            self._batches = None
            room = self._pool.sets(case) * case.bytes_each
            batches = self._pool.batches(case, self._copies.sets(case.bytes_each, room))
            self._batches = (case.key, batches, _accuracy.right(batches[-1]))
        return self._batches[1:]
