# SPDX-License-Identifier: Apache-2.0
"""Every figure of ``bench ops``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from vllm_hwplugin_lab.bench import between
from vllm_hwplugin_lab.bench.micro import find, op_ratio
from vllm_hwplugin_lab.bench.micro import op_cases as ops

from ._judged import MARGIN, verdicts
from ._text import NONE, head, memory, row, us

#: From here on vLLM's csrc/pos_encoding_kernels.cu has no conversion.
_READS_AS_IT_IS = Version("0.21.0")
_WHY = ", because it converts the whole table in each call, which vLLM 0.21 no longer does"


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    yield "### Verdicts"
    yield ""
    yield from head(["operation", "verdict", *(f"ratio, {size} sizes" for size in (ops.SMALL, ops.LARGE)), "why"])
    for found in verdicts(results).values():
        ratios = [f"{found.ratios[size]:.2f}" if size in found.ratios else NONE for size in (ops.SMALL, ops.LARGE)]
        yield row([f"`{found.op}`", found.verdict, *ratios, found.why.partition(";")[0] or NONE])
    for op in ops.OPS:
        yield ""
        yield from _operation(results, op, [case for case in ops.CASES.values() if case.op == op])


def _operation(results: Mapping[str, Any], op: str, cases: Sequence[ops.OpCase]) -> Iterator[str]:
    yield f"### `{op}`"
    yield ""
    rivals = [f"{name.replace(ops.VLLM, 'vLLM', 1)} us" for name in cases[0].rivals]
    yield from head(
        ["shape", "tokens", "us", "GB/s", "% of copy", "% of same size", *rivals, "ratio", "agrees"],
    )
    for case in cases:
        ours, by = find(results, ops.OURS, case.key), op_ratio(results, case)
        figures = [NONE] * 4 if ours is None else memory(results, ours, case.bytes_moved)
        times = [us(find(results, name, case.key)) for name in case.rivals]
        ratio = NONE if by is None else f"{by:.2f}"
        right = NONE if ours is None else "yes" if ours["mismatch"] is None else "**no**"
        yield row([case.shape, str(case.tokens), *figures, *times, ratio, right])
    if op in ops.FLOAT32_TABLE:
        yield from _conversion(results, cases)


def _conversion(results: Mapping[str, Any], cases: Sequence[ops.OpCase]) -> Iterator[str]:
    """What vLLM's operation pays for a table that is not in float32."""
    more = []
    for case in cases:
        plain, converted = (find(results, name, case.key) for name in (ops.VLLM, ops.VLLM_FLOAT32))
        if plain is not None and converted is not None and plain["seconds"] > converted["seconds"] * (1 + MARGIN):
            more.append(plain["seconds"] - converted["seconds"])
    yield ""
    yield (
        "The ratio is by the faster of vLLM's two columns. Its layer passes the table of cosines in the model's type, "
        "which is what the plugin's kernel gets here."
    )
    if more:
        yield (
            f"For {len(more)} of {len(cases)} shapes that costs vLLM's operation "
            f"{between((seconds * 1e6 for seconds in more), '.1f')} us a call more than a table in float32"
            f"{_WHY if Version(results['host']['vllm']) < _READS_AS_IT_IS else ''}. The ratio leaves that out."
        )
