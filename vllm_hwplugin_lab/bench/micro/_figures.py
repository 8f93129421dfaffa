# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``, its figures and its table."""

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
    """Return a measured cell, or None."""
    for cell in results["cells"]:
        if (cell["kernel"], cell["case"], cell["status"]) == (kernel, case, MEASURED):
            return dict(cell)
    return None


def bandwidth(results: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """Return the copy bandwidth of the cell's process, bytes per second."""
    return float(results["processes"][cell["process"]]["copy_bandwidth"])


#: FLOP/s of attention's products, as in FlashAttention 3 with head size 256 and a prompt of 8192 tokens (698 and
#: 750 TFLOP/s in kernels-attention-h200-vllm-0.26.0.json). NVIDIA's data sheet of the H200 has 989 for dense bfloat16.
ATTENTION_FLOPS: Final = 700e12
#: Least seconds of two dependent launches that begin with dependent reads. An estimate: a copy of 2 MiB (one launch,
#: one read) took 2.2e-6 in that file.
ATTENTION_FIXED: Final = 6e-6

BY_MEMORY, BY_PRODUCTS, BY_LAUNCHES = "memory", "products", "launches"


def roofline(results: Mapping[str, Any], case: attention.AttentionCase, cell: Mapping[str, Any]) -> tuple[float, str]:
    """Return a case's least seconds on the cell's device, and the bound.

    The largest of ``bytes_each`` / copy bandwidth, ``flops`` / `ATTENTION_FLOPS`, and `ATTENTION_FIXED` (Williams,
    Waterman, Patterson: Roofline, 2009). Bytes and FLOPs follow from the shape.
    """
    bounds = {
        BY_MEMORY: case.bytes_each / bandwidth(results, cell),
        BY_PRODUCTS: case.flops / ATTENTION_FLOPS,
        BY_LAUNCHES: ATTENTION_FIXED,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return bounds[bound], bound


def op_ratio(results: Mapping[str, Any], case: ops.OpCase) -> float | None:
    """Return vLLM's time / the plugin's time; None: not measured."""
    return _ratio(results, ops.VLLM, ops.OURS, case.key)


def _ratio(results: Mapping[str, Any], kernel: str, by: str, case: str) -> float | None:
    cell, base = find(results, kernel, case), find(results, by, case)
    return None if cell is None or base is None else float(cell["seconds"] / base["seconds"])


def left_out(results: Mapping[str, Any]) -> list[str]:
    """Return why cells have no figure, and which results are wrong.

    Each reason is listed once; refused cells are not listed.
    """
    reasons: dict[tuple[str, str, str], int] = {}
    for cell in results["cells"]:
        if cell["status"] in (MEASURED, REFUSED):
            continue
        # Plugin or vLLM may lack an operation, independently of the shape.
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
    """Return the results file; ``kind`` is ``attention`` or ``ops``."""
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
    """Return the table of speedups: geometric mean, least and most.

    A speedup is another kernel's time / the plugin's time.
    """
    if results["kind"] == "attention":
        names = {"prefill": attention.PREFILL, "decode and verification": (*attention.DECODE, *attention.AS_SERVED)}
        table = _table("time / plugin's time", "kernel", *names, "worst error / SDPA's")
        for name in dict.fromkeys(kernel for kernel, _ in attention.plan()):
            keys = [[case.key for case in group] for group in names.values()]
            cells = [cell for key in chain(*keys) if (cell := find(results, name, key)) is not None]
            # Kernels for head size 256 have no figure for these shapes.
            if cells:
                spreads = [_spread([_ratio(results, name, attention.OURS, key) for key in group]) for group in keys]
                table.add_row(name, *spreads, f"{max(cell['error_ratio'] for cell in cells):.2f}")
        return table
    sizes = {
        size: ", ".join(str(tokens) for tokens, kind in ops.TOKENS.items() if kind == size)
        for size in (ops.SMALL, ops.LARGE)
    }
    columns = [f"{text} tokens" for text in sizes.values()]
    table = _table("speedup, vLLM's time / plugin's time", "operation", *columns, "agrees")
    for op in ops.OPS:
        cases = [case for case in ops.CASES.values() if case.op == op]
        cells = [cell for case in cases if (cell := find(results, ops.OURS, case.key)) is not None]
        if cells:
            spreads = [_spread([op_ratio(results, case) for case in cases if case.size == size]) for size in sizes]
            right = sum(cell["mismatch"] is None for cell in cells)
            table.add_row(op, *spreads, "yes" if right == len(cells) else f"{right} of {len(cells)}")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=f"{title}: mean (least–most), shapes")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _spread(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{geometric_mean(known):.2f} ({min(known):.2f}–{max(known):.2f}), {len(known)}" if known else "-"
