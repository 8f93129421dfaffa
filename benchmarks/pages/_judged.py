# SPDX-License-Identifier: Apache-2.0
"""Verdicts and goals for figures of single kernels."""

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

#: Smaller differences are within the noise of two runs.
MARGIN = 0.03


@dataclass(frozen=True)
class Verdict:
    """On one operation, one device and one vLLM version.

    Attributes:
        verdict: ``gain`` if the operation is faster by more than `MARGIN` in every size class, right everywhere, and
            slower by more than that on no shape; else ``loss``.
        ratios: size class -> vLLM's time by ours, the geometric mean over the shapes.
        least: the lowest ratio of all shapes; None if nothing was measured.
        why: reasons of a loss; empty for a gain.
    """

    op: str
    device: str
    vllm: str
    verdict: Literal["gain", "loss"]
    ratios: Mapping[str, float]
    least: float | None
    why: str


def verdicts(results: Mapping[str, Any]) -> dict[str, Verdict]:
    """Return the verdict on each operation, from one file of ``bench ops``."""
    host = results["host"]
    return {op: _verdict(results, op, host["name"], host["vllm"]) for op in ops.OPS}


def _verdict(results: Mapping[str, Any], op: str, device: str, vllm: str) -> Verdict:
    ratios: dict[str, list[float]] = {}
    losses: list[str] = []
    for case in ops.CASES.values():
        if case.op != op:
            continue
        ours, ratio = find(results, ops.OURS, case.key), op_ratio(results, case)
        if ours is None or ratio is None:
            losses.append(f"{case.shape} with {case.tokens} tokens was not measured on both sides")
            continue
        if ours["mismatch"] is not None:
            losses.append(f"{case.shape} with {case.tokens} tokens is wrong: {ours['mismatch']}")
        ratios.setdefault(case.size, []).append(ratio)
        if ratio < 1 - MARGIN:
            losses.append(f"{case.shape} with {case.tokens} tokens runs at {ratio:.2f} of vLLM's speed")
    means = {size: geometric_mean(of_size) for size, of_size in ratios.items()}
    losses += [
        f"{size} sizes run at {mean:.2f} of vLLM's speed, which is no gain"
        for size, mean in means.items()
        if mean <= 1 + MARGIN
    ]
    least = min((ratio for of_size in ratios.values() for ratio in of_size), default=None)
    return Verdict(op, device, vllm, "loss" if losses else "gain", means, least, "; ".join(losses))


#: Error over SDPA's, time over the roofline (decode), share of the copy bandwidth (operations), and FLOP/s of
#: FlashAttention 3 by ours.
ERROR = 2.0
ROOFLINE = 1.67
ROOFLINE_TEXT = (
    "The time is the longest of three: bytes of keys, values, queries and results, each once, by the bandwidth "
    "of a copy of 2 GiB in the same process (memory); FLOPs of the two products by "
    f"{ATTENTION_FLOPS / 1e12:.0f} TFLOP/s, about FlashAttention 3's rate at head size 256 for a prompt of 8192 "
    f"tokens (products); {ATTENTION_FIXED * 1e6:.0f} us, an estimate for two launches, when the second waits for "
    "the first, for any number of bytes (launches)."
)
OPS_SHARE = 0.8
#: Launches that move fewer bytes are not judged by memory bandwidth: more than twice the 60 MiB of an H200's L2.
OPS_BYTES = 128 << 20
FA3_FACTOR = 3.0


@dataclass(frozen=True)
class Goal:
    """One sentence, how many figures meet it, and the figure that is furthest from it.

    ``met`` is None if nothing was measured, or if there is no such goal and ``worst`` says why.
    """

    text: str
    met: bool | None
    count: int
    total: int
    worst: str


def goal_table(results: Mapping[str, Any]) -> list[str]:
    rows = []
    for goal in goals(results):
        met = NONE if goal.met is None else "yes" if goal.met else "**no**"
        rows.append([goal.text, met, f"{goal.count} of {goal.total}" if goal.total else NONE, goal.worst])
    return table(["goal", "met", "figures that meet it", "furthest from it"], rows)


def goals(results: Mapping[str, Any]) -> list[Goal]:
    return list(_attention(results) if results["kind"] == "attention" else _ops(results))


def _goal(text: str, figures: Sequence[tuple[float, float, str]], missing: int = 0) -> Goal:
    """Return a goal from figures with thresholds and labels; higher is better.

    Args:
        missing: cases without a figure: the goal is then not met, unless there is no figure at all.
    """
    if not figures:
        return Goal(text, None, 0, missing, "not measured")
    count = sum(figure >= least for figure, least, _ in figures)
    figure, _, label = min(figures, key=lambda entry: entry[0] / entry[1])
    total = len(figures) + missing
    return Goal(text, count == total, count, total, f"{label}: {figure:.2f}")


def _attention(results: Mapping[str, Any]) -> Iterator[Goal]:
    # `--kind` leaves a kind of batches out.
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
        yield _goal(f"the same, only shapes bound by {bound}", figures)


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
    yield _goal(f"prefill FLOP/s within {FA3_FACTOR:g} times {attention.FA3}'s at head size 256", figures)


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
