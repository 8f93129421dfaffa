# SPDX-License-Identifier: Apache-2.0
"""Every figure of ``bench attention``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.micro import MEASURED, find, roofline
from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.table import between

from ._text import NONE, flops, head, memory, row, us

_FIGURES = ("us", "GB/s", "% of copy", "% of same size", "TFLOP/s", "% of roofline", "bound by", "error")
PROMPTS = [f"{c.batch} x {c.query} tokens, {c.kv_heads} KV head{'s'[: c.kv_heads - 1]}" for c in attention.PREFILL]


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    if present(results, attention.PREFILL):
        yield from _prefill(results)
    others = [name for name in present(results, attention.DECODE) if name != attention.OURS]
    for kv_heads in dict.fromkeys(case.kv_heads for case in attention.DECODE):
        yield ""
        yield from _decode(results, kv_heads, others)
    yield from slower(results, others)
    if present(results, attention.AS_SERVED):
        yield ""
        yield from _served(results)


def _prefill(results: Mapping[str, Any]) -> Iterator[str]:
    yield "### Prefill: ms (TFLOP/s), error"
    yield ""
    yield from head(["kernel", *PROMPTS])
    for cases, note in ((attention.PREFILL, ""), (attention.PREFILL_256, ", head size 256")):
        for name in present(results, cases):
            yield row([f"{name}{note}", *(flops(find(results, name, case.key), case) for case in cases)])


def _decode(results: Mapping[str, Any], kv_heads: int, others: Sequence[str]) -> Iterator[str]:
    yield f"### Decode and verification, 8 query heads on {kv_heads} KV head{'s'[: kv_heads - 1]}"
    yield ""
    where = ["batch", "context", "query tokens"]
    yield from head([*where, *_FIGURES, *(f"{name} us" for name in others)])
    for case in attention.DECODE:
        if case.kv_heads != kv_heads:
            continue
        shape = [str(case.batch), str(case.context), str(case.query)]
        times = [us(find(results, name, case.key)) for name in others]
        yield row([*shape, *_figures(results, case), *times])


def _served(results: Mapping[str, Any]) -> Iterator[str]:
    yield "### Decode and verification, other batch sizes and unequal lengths"
    yield ""
    yield (
        "Batches like a server's; no goal is about them. Log-normal lengths are given with the standard deviation of "
        "their logarithm; mean and longest are from the drawn requests. The error also covers the longest and the "
        f"shortest request. Ratio: {attention.TRITON}'s time by the plugin's."
    )
    yield ""
    where = ["batch", "mean length", "longest", "lengths", "query tokens", "KV heads"]
    yield from head([*where, *_FIGURES, f"{attention.TRITON} us", "ratio"])
    for case in attention.AS_SERVED:
        ours, theirs = (find(results, name, case.key) for name in (attention.OURS, attention.TRITON))
        mean, longest = f"{sum(case.lengths) / case.batch:.0f}", str(max(case.lengths))
        lengths = f"log-normal, {case.spread:.1f}" if case.spread else "equal"
        shape = [str(case.batch), mean, longest, lengths, str(case.query), str(case.kv_heads)]
        ratio = NONE if ours is None or theirs is None else f"{theirs['seconds'] / ours['seconds']:.2f}"
        yield row([*shape, *_figures(results, case), us(theirs), ratio])


def _figures(results: Mapping[str, Any], case: attention.AttentionCase) -> list[str]:
    """Return `_FIGURES` of the plugin's kernel."""
    ours = find(results, attention.OURS, case.key)
    if ours is None:
        return [NONE] * len(_FIGURES)
    speed = f"{case.flops / ours['seconds'] / 1e12:.1f}"
    least, bound = roofline(results, case, ours)
    share = f"{least / ours['seconds']:.0%}"
    return [*memory(results, ours, case.kv_bytes), speed, share, bound, f"{ours['error_ratio']:.2f}"]


def slower(results: Mapping[str, Any], others: Sequence[str]) -> Iterator[str]:
    """Say on how many shapes another kernel is faster."""
    for name in others:
        known = ratios(results, name, attention.OURS, attention.DECODE)
        slower = [ratio for ratio in known if ratio < 1]
        if slower:
            yield ""
            yield (
                f"{name} is faster on {len(slower)} of {len(known)} shapes in these tables: it takes "
                f"{between(slower, '.2f')} of the plugin's time there."
            )


def ratios(results: Mapping[str, Any], name: str, by: str, cases: Sequence[attention.AttentionCase]) -> list[float]:
    """Return times of one kernel by another's, if both were measured."""
    pairs = [(find(results, name, case.key), find(results, by, case.key)) for case in cases]
    return [cell["seconds"] / other["seconds"] for cell, other in pairs if cell is not None and other is not None]


def present(results: Mapping[str, Any], cases: Sequence[attention.AttentionCase]) -> list[str]:
    """Return the kernels with a figure for the cases, in order."""
    keys = {case.key for case in cases}
    measured = {c["kernel"] for c in results["cells"] if c["status"] == MEASURED and c["case"] in keys}
    return [name for name in dict.fromkeys(kernel for kernel, _ in attention.plan()) if name in measured]
