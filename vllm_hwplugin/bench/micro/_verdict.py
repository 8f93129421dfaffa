# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's operation is faster than vLLM's on a device: what the table of overrides has to agree with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import _op_cases as cases
from ._figures import fastest, find

#: Less is within what two runs differ by.
MARGIN = 0.03


@dataclass(frozen=True)
class Verdict:
    """Of one operation on one device and vLLM version.

    Attributes:
        verdict: ``gain`` where the operation is faster by more than `MARGIN` in every size class, right everywhere, and
            slower by more than that on no shape; else ``loss``.
        ratios: size class -> vLLM's time by ours, the geometric mean over the shapes. vLLM's time is the least over the
            ways of calling its operation (``OpCase.rivals``), all of which have to be measured.
        why: what a loss follows from; empty for a gain.
    """

    op: str
    device: str
    vllm: str
    verdict: Literal["gain", "loss"]
    ratios: Mapping[str, float]
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
        ours, theirs = find(results, cases.OURS, case.key), fastest(results, case.rivals, case.key)
        if ours is None or theirs is None:
            faults.append(f"{case.shape} with {case.tokens} tokens was not measured on both sides")
            continue
        if ours["mismatch"] is not None:
            faults.append(f"{case.shape} with {case.tokens} tokens is wrong: {ours['mismatch']}")
        ratio = theirs["seconds"] / ours["seconds"]
        ratios.setdefault(case.size, []).append(ratio)
        if ratio < 1 - MARGIN:
            faults.append(f"{case.shape} with {case.tokens} tokens runs at {ratio:.2f} of vLLM's speed")
    means = {size: math.exp(sum(map(math.log, found)) / len(found)) for size, found in ratios.items()}
    faults += [
        f"{size} sizes run at {mean:.2f} of vLLM's speed, which is no gain"
        for size, mean in means.items()
        if mean <= 1 + MARGIN
    ]
    return Verdict(op, device, vllm, "loss" if faults else "gain", means, "; ".join(faults))


def as_json(found: Mapping[str, Verdict]) -> list[dict[str, Any]]:
    """For the results file, where other programs read it."""
    return [
        {
            "op": one.op,
            "device": one.device,
            "vllm": one.vllm,
            "verdict": one.verdict,
            "ratios": {size: round(ratio, 3) for size, ratio in one.ratios.items()},
            "why": one.why,
        }
        for one in found.values()
    ]
