# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's operation is faster than vLLM's on a device: what the table of overrides has to agree with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, Literal

from vllm_hwplugin_lab.bench.micro import find, op_ratio
from vllm_hwplugin_lab.bench.micro import op_cases as cases

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
    return {op: _verdict(results, op, host["name"], host["vllm"]) for op in cases.OPS}


def _verdict(results: Mapping[str, Any], op: str, device: str, vllm: str) -> Verdict:
    ratios: dict[str, list[float]] = {}
    faults: list[str] = []
    for case in cases.CASES.values():
        if case.op != op:
            continue
        ours, ratio = find(results, cases.OURS, case.key), op_ratio(results, case)
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
