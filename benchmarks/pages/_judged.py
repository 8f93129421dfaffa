# SPDX-License-Identifier: Apache-2.0
"""What figures of single kernels mean: verdicts and goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, Literal

from vllm_hwplugin_lab.bench.micro import (
    ATTENTION_FIXED,
    ATTENTION_FLOPS,
    BY_LAUNCHES,
    BY_MEMORY,
    BY_PRODUCTS,
    bandwidth,
    find,
    op_ratio,
    roofline,
)
from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.micro import op_cases as ops

from ._text import NONE, table

#: Less is within what two runs differ by.
MARGIN = 0.03


@dataclass(frozen=True)
class Verdict:
    """Of one operation on one device and vLLM version.

    Attributes:
        verdict: ``gain`` where the operation is faster by more than `MARGIN` in every size class, right everywhere, and
            slower by more than that on no shape; else ``loss``.
        ratios: size class -> vLLM's time by ours, the geometric mean over the shapes.
        least: the lowest of all shapes; None where nothing was measured.
        why: what a loss follows from; empty for a gain.
    """

    op: str
    device: str
    vllm: str
    verdict: Literal["gain", "loss"]
    ratios: Mapping[str, float]
    least: float | None
    why: str


def verdicts(results: Mapping[str, Any]) -> dict[str, Verdict]:
    """The verdict on each operation, from one file of ``bench ops``."""
    host = results["host"]
    return {op: _verdict(results, op, host["name"], host["vllm"]) for op in ops.OPS}


def _verdict(results: Mapping[str, Any], op: str, device: str, vllm: str) -> Verdict:
    ratios: dict[str, list[float]] = {}
    faults: list[str] = []
    for case in ops.CASES.values():
        if case.op != op:
            continue
        ours, ratio = find(results, ops.OURS, case.key), op_ratio(results, case)
        if ours is None or ratio is None:
            faults.append(f"{case.shape} with {case.tokens} tokens was not measured on both sides")
            continue
        if ours["mismatch"] is not None:
            faults.append(f"{case.shape} with {case.tokens} tokens is wrong: {ours['mismatch']}")
        ratios.setdefault(case.size, []).append(ratio)
        if ratio < 1 - MARGIN:
            faults.append(f"{case.shape} with {case.tokens} tokens runs at {ratio:.2f} of vLLM's speed")
    means = {size: geometric_mean(found) for size, found in ratios.items()}
    faults += [
        f"{size} sizes run at {mean:.2f} of vLLM's speed, which is no gain"
        for size, mean in means.items()
        if mean <= 1 + MARGIN
    ]
    least = min((ratio for found in ratios.values() for ratio in found), default=None)
    return Verdict(op, device, vllm, "loss" if faults else "gain", means, least, "; ".join(faults))


#: Error over SDPA's, time over the roofline (decode), share of the copy bandwidth (operations), and FLOP/s of
#: FlashAttention 3 by ours.
ERROR = 2.0
ROOFLINE = 1.67
ROOFLINE_TEXT = (
    "The time is the longest of three: bytes of keys, values, queries and results, each once, by the bandwidth "
    "of a copy of 2 GiB in the same process (memory); FLOPs of the two products by "
    f"{ATTENTION_FLOPS / 1e12:.0f} TFLOP/s, about what FlashAttention 3 comes to at head size 256 for a prompt of 8192 "
    f"tokens (products); {ATTENTION_FIXED * 1e6:.0f} us, an estimate for two launches of which the second waits for "
    "the first, whatever they move (launches)."
)
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


def goal_table(results: Mapping[str, Any]) -> list[str]:
    """The goals as a table."""
    rows = []
    for goal in goals(results):
        met = NONE if goal.met is None else "yes" if goal.met else "**no**"
        rows.append([goal.text, met, f"{goal.count} of {goal.total}" if goal.total else NONE, goal.worst])
    return table(["goal", "met", "figures that meet it", "furthest from it"], rows)


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
    """Of the kinds of batches that were to be measured; `--kind` leaves one out."""
    kinds = results["settings"]["only"].get("kind") or ("prefill", "decode")
    wanted = [case for case in (*attention.PREFILL, *attention.DECODE) if case.kind in kinds]
    measured = [(case, cell) for case in wanted if (cell := find(results, attention.OURS, case.key)) is not None]
    yield _goal(
        f"error within {ERROR:g} times SDPA's (figure: SDPA's by ours)",
        [(1 / max(cell["error_ratio"], 1e-9), 1 / ERROR, case.key) for case, cell in measured],
        len(wanted) - len(measured),
    )
    if "decode" in kinds:
        yield from _decode(results, measured)
    if "prefill" in kinds:
        yield from _prefill(results, measured)


_Measured = Sequence[tuple[attention.AttentionCase, Mapping[str, Any]]]


def _decode(results: Mapping[str, Any], measured: _Measured) -> Iterator[Goal]:
    decode = [(*roofline(results, case, cell), case, cell) for case, cell in measured if case.kind == "decode"]
    text = f"decode and verification within {ROOFLINE:g} times the roofline (figure: the roofline by the time)"
    figures = [(least / cell["seconds"], 1 / ROOFLINE, case.key) for least, _, case, cell in decode]
    yield _goal(text, figures, len(attention.DECODE) - len(decode))
    for bound in (BY_MEMORY, BY_PRODUCTS, BY_LAUNCHES):
        figures = [(least / cell["seconds"], 1 / ROOFLINE, case.key) for least, by, case, cell in decode if by == bound]
        yield _goal(f"of these, those bound by {bound}", figures)


def _prefill(results: Mapping[str, Any], measured: _Measured) -> Iterator[Goal]:
    for rival in (attention.FLEX, attention.SDPA, attention.SDPA_REPEATED):
        yield _goal(
            f"prefill not slower than {rival} (figure: its time by ours)",
            [
                (theirs["seconds"] / cell["seconds"], 1.0, case.key)
                for case, cell in measured
                if case.kind == "prefill" and (theirs := find(results, rival, case.key)) is not None
            ],
        )
    figures = []
    for case, narrow in zip(attention.PREFILL, attention.PREFILL_256, strict=True):
        ours, theirs = find(results, attention.OURS, case.key), find(results, attention.FA3, narrow.key)
        if ours is not None and theirs is not None:
            speeds = (case.flops / ours["seconds"], narrow.flops / theirs["seconds"])
            figures.append((speeds[0] / speeds[1], 1 / FA3_FACTOR, case.key))
    yield _goal(f"prefill FLOP/s within {FA3_FACTOR:g} times those of {attention.FA3} at head size 256", figures)


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
