# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``, single figures of it, and the table at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import geometric_mean
from typing import Any, Final

from rich.table import Table

from .._host import Host
from ..results import provenance
from . import _attention_cases as attention
from . import _op_cases as ops
from ._supervise import MEASURED, MISSING, REFUSED


def find(results: Mapping[str, Any], kernel: str, case: str) -> Mapping[str, Any] | None:
    """A cell that was measured, or None."""
    for cell in results["cells"]:
        if (cell["kernel"], cell["case"], cell["status"]) == (kernel, case, MEASURED):
            return dict(cell)
    return None


def bandwidth(results: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """The copy bandwidth of the process that measured the cell, bytes a second."""
    return float(results["processes"][cell["process"]]["copy_bandwidth"])


#: FLOP/s of attention's products: what FlashAttention 3 comes to at head size 256 for a prompt of 8192 tokens (698 and
#: 750 TFLOP/s in kernels-attention-h200-vllm-0.26.0.json). NVIDIA's data sheet of the H200 says 989 for dense bfloat16.
ATTENTION_FLOPS: Final = 700e12
#: Seconds that two launches take whatever they move, the second one waiting for the first: each of them begins with
#: reads that depend on one another. An estimate: a copy of 2 MiB, one launch and one read, took 2.2e-6 in that file.
ATTENTION_FIXED: Final = 6e-6

BY_MEMORY, BY_PRODUCTS, BY_LAUNCHES = "memory", "products", "launches"


def roofline(results: Mapping[str, Any], case: attention.AttentionCase, cell: Mapping[str, Any]) -> tuple[float, str]:
    """What a case's seconds are held to on the device that measured the cell, and what it is bound by.

    The largest of ``bytes_each`` by the copy bandwidth, ``flops`` by `ATTENTION_FLOPS`, and `ATTENTION_FIXED`
    (Williams, Waterman, Patterson: Roofline, 2009). Bytes and FLOPs follow from the shape.
    """
    bounds = {
        BY_MEMORY: case.bytes_each / bandwidth(results, cell),
        BY_PRODUCTS: case.flops / ATTENTION_FLOPS,
        BY_LAUNCHES: ATTENTION_FIXED,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return bounds[bound], bound


def op_ratio(results: Mapping[str, Any], case: ops.OpCase) -> float | None:
    """vLLM's time by the plugin's; None where a side was not measured."""
    return _ratio(results, ops.VLLM, ops.OURS, case.key)


def _ratio(results: Mapping[str, Any], kernel: str, by: str, case: str) -> float | None:
    one, other = find(results, kernel, case), find(results, by, case)
    return None if one is None or other is None else float(one["seconds"] / other["seconds"])


def left_out(results: Mapping[str, Any]) -> list[str]:
    """What has no figure and why, each reason once, and what is wrong; what a kernel never claimed is no part of it."""
    reasons: dict[tuple[str, str, str], int] = {}
    for cell in results["cells"]:
        if cell["status"] in (MEASURED, REFUSED):
            continue
        # The operation matters where one side lacks some of them; a shape does not.
        kernel = cell["kernel"] + (f" {cell['case'].split()[0]}" if results["kind"] == "ops" else "")
        key = (kernel, cell["status"], cell["reason"] or "")
        reasons[key] = reasons.get(key, 0) + 1
    lines = [
        f"{kernel}: {status}{'' if status == MISSING else f' ({count} cells)'}: {reason}"
        for (kernel, status, reason), count in reasons.items()
    ]
    wrong = [cell for cell in results["cells"] if cell["status"] == MEASURED and cell.get("mismatch")]
    return lines + [f"{cell['kernel']} {cell['case']}: {cell['mismatch']}" for cell in wrong]


FORMAT = 2


def make_results(
    kind: str,
    host: Host,
    settings: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    processes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole file; ``kind`` is ``attention`` or ``ops``."""
    return {
        "kernels_format": FORMAT,
        "kind": kind,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": dict(settings),
        "processes": list(processes),
        "cells": list(outcomes),
    }


def summary(results: Mapping[str, Any]) -> Table:
    """Other kernels' times by the plugin's, so that more than 1 is a gain: geometric mean, least and most."""
    if results["kind"] == "attention":
        names = {"prefill": attention.PREFILL, "decode and verification": (*attention.DECODE, *attention.AS_SERVED)}
        drawn = _table("time by the plugin's kernel", "kernel", *names, "worst error by SDPA's")
        for name in dict.fromkeys(kernel for kernel, _ in attention.plan()):
            keys = [[case.key for case in group] for group in names.values()]
            found = [cell for key in chain(*keys) if (cell := find(results, name, key)) is not None]
            # Those at head size 256 have no figure on these shapes.
            if found:
                spreads = [_spread([_ratio(results, name, attention.OURS, key) for key in group]) for group in keys]
                drawn.add_row(name, *spreads, f"{max(cell['error_ratio'] for cell in found):.2f}")
        return drawn
    sizes = {size: ", ".join(str(n) for n, one in ops.TOKENS.items() if one == size) for size in (ops.SMALL, ops.LARGE)}
    tokens = [f"{text} tokens" for text in sizes.values()]
    drawn = _table("vLLM's time by the plugin's", "operation", *tokens, "agrees")
    for op in ops.OPS:
        cases = [case for case in ops.CASES.values() if case.op == op]
        found = [cell for case in cases if (cell := find(results, ops.OURS, case.key)) is not None]
        if found:
            spreads = [_spread([op_ratio(results, case) for case in cases if case.size == size]) for size in sizes]
            right = sum(cell["mismatch"] is None for cell in found)
            drawn.add_row(op, *spreads, "yes" if right == len(found) else f"{right} of {len(found)}")
    return drawn


def _table(title: str, first: str, *others: str) -> Table:
    drawn = Table(title=f"{title}: mean (least to most), shapes")
    drawn.add_column(first)
    for name in others:
        drawn.add_column(name, justify="right")
    return drawn


def _spread(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{geometric_mean(known):.2f} ({min(known):.2f} to {max(known):.2f}), {len(known)}" if known else "-"
