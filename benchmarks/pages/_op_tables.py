# SPDX-License-Identifier: Apache-2.0
"""Every figure of ``bench ops``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.micro import find, op_ratio
from vllm_hwplugin_lab.bench.micro import op_cases as ops

from ._judged import verdicts
from ._text import NONE, head, memory, row, us


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    yield "### Verdicts"
    yield ""
    yield from head(["operation", "verdict", *(f"ratio, {size} sizes" for size in (ops.SMALL, ops.LARGE)), "why"])
    for verdict in verdicts(results).values():
        ratios = [f"{verdict.ratios[size]:.2f}" if size in verdict.ratios else NONE for size in (ops.SMALL, ops.LARGE)]
        yield row([f"`{verdict.op}`", verdict.verdict, *ratios, verdict.why.partition(";")[0] or NONE])
    for op in ops.OPS:
        yield ""
        yield from _operation(results, op, [case for case in ops.CASES.values() if case.op == op])


def _operation(results: Mapping[str, Any], op: str, cases: Sequence[ops.OpCase]) -> Iterator[str]:
    yield f"### `{op}`"
    yield ""
    yield from head(["shape", "tokens", "us", "GB/s", "% of copy", "% of same size", "vLLM us", "ratio", "agrees"])
    for case in cases:
        ours, by = find(results, ops.OURS, case.key), op_ratio(results, case)
        figures = [NONE] * 4 if ours is None else memory(results, ours, case.bytes_moved)
        theirs = us(find(results, ops.VLLM, case.key))
        ratio = NONE if by is None else f"{by:.2f}"
        right = NONE if ours is None else "yes" if ours["mismatch"] is None else "**no**"
        yield row([case.shape, str(case.tokens), *figures, theirs, ratio, right])
