# SPDX-License-Identifier: Apache-2.0
"""What the kernels are held to, and whether a results file shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.micro import bandwidth, find
from vllm_hwplugin_lab.bench.micro import op_cases as ops

#: Error over SDPA's, share of the copy bandwidth (decode, operations), and FLOP/s of FlashAttention 3 by ours.
ERROR = 2.0
DECODE_SHARE = 0.6
OPS_SHARE = 0.8
#: Bytes that a launch has to move to be held to the bandwidth of memory: more than twice the 60 MiB of an H200's L2.
OPS_BYTES = 128 << 20
FA3_FACTOR = 3.0


@dataclass(frozen=True)
class Goal:
    """One sentence, how many of the figures behind it meet it, and the one that is furthest from it.

    ``met`` is None where nothing was measured that could say, or where there is no such goal and ``worst`` says why.
    """

    text: str
    met: bool | None
    count: int
    total: int
    worst: str


def goals(results: Mapping[str, Any]) -> list[Goal]:
    return list(_attention(results) if results["kind"] == "attention" else _ops(results))


def _goal(text: str, figures: Sequence[tuple[float, float, str]], missing: int = 0) -> Goal:
    """A goal from (figure, least figure that meets it, what it is of); higher figures are better.

    Args:
        missing: cases without a figure: the goal is then not met, but for one that no case speaks of.
    """
    if not figures:
        return Goal(text, None, 0, missing, "not measured")
    count = sum(figure >= least for figure, least, _ in figures)
    figure, _, what = min(figures, key=lambda one: one[0] / one[1])
    total = len(figures) + missing
    return Goal(text, count == total, count, total, f"{what}: {figure:.2f}")


def _attention(results: Mapping[str, Any]) -> Iterator[Goal]:
    wanted = (*attention.PREFILL, *attention.DECODE)
    measured = [(case, cell) for case in wanted if (cell := find(results, attention.OURS, case.key)) is not None]
    yield _goal(
        f"error within {ERROR:g} times SDPA's (figure: SDPA's by ours)",
        [(1 / max(cell["error_ratio"], 1e-9), 1 / ERROR, case.key) for case, cell in measured],
        len(wanted) - len(measured),
    )
    decode = [(case, cell) for case, cell in measured if case.kind == "decode"]
    yield _goal(
        f"decode and verification at {DECODE_SHARE:.0%} of the copy bandwidth or more",
        [(case.kv_bytes / cell["seconds"] / bandwidth(results, cell), DECODE_SHARE, case.key) for case, cell in decode],
        len(attention.DECODE) - len(decode),
    )
    for rival in (attention.FLEX, attention.SDPA, attention.SDPA_REPEATED):
        yield _goal(
            f"prefill not slower than {rival} (figure: its time by ours)",
            [
                (theirs["seconds"] / cell["seconds"], 1.0, case.key)
                for case, cell in measured
                if case.kind == "prefill" and (theirs := find(results, rival, case.key)) is not None
            ],
        )
    for rival in (attention.FA3, attention.FA3_CONTIGUOUS):
        figures = []
        for case, narrow in zip(attention.PREFILL, attention.PREFILL_256, strict=True):
            ours, theirs = find(results, attention.OURS, case.key), find(results, rival, narrow.key)
            if ours is not None and theirs is not None:
                speeds = (case.flops / ours["seconds"], narrow.flops / theirs["seconds"])
                figures.append((speeds[0] / speeds[1], 1 / FA3_FACTOR, case.key))
        yield _goal(f"prefill FLOP/s within {FA3_FACTOR:g} times those of {rival} at head size 256", figures)


def _ops(results: Mapping[str, Any]) -> Iterator[Goal]:
    for op in ops.OPS:
        text = f"{op} at {OPS_SHARE:.0%} of the copy bandwidth"
        if op in ops.NOT_BY_MEMORY:
            yield Goal(text, None, 0, 0, f"no goal: {ops.NOT_BY_MEMORY[op]}")
        else:
            large = [case for case in ops.CASES.values() if case.op == op and case.bytes_moved >= OPS_BYTES]
            figures = [
                (case.bytes_moved / cell["seconds"] / bandwidth(results, cell), OPS_SHARE, case.key)
                for case in large
                if (cell := find(results, ops.OURS, case.key)) is not None
            ]
            yield _goal(f"{text}, from {OPS_BYTES >> 20} MiB on", figures, len(large) - len(figures))
        right = [
            (float(cell["mismatch"] is None), 1.0, case.key)
            for case in ops.CASES.values()
            if case.op == op and (cell := find(results, ops.OURS, case.key)) is not None
        ]
        yield _goal(f"{op} agrees with its reference", right)
