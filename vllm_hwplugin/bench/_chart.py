# SPDX-License-Identifier: Apache-2.0
"""The chart of docs/benchmarks.md: tokens/s by stock's, one group of bars a case, one bar a batch size.

The bars are the patched side; where Model Runner V2 was measured, a mark over each bar's middle is its ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..patching import PatchingError
from ._report import rows


class ChartError(PatchingError):
    """There is nothing to draw, or nothing to draw with."""


def draw(files: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw all cases of all files into one SVG (or PNG, by the suffix).

    Raises:
        ChartError: matplotlib is missing, or no case has both sides.
    """
    try:
        import matplotlib
    except ImportError:
        raise ChartError("the chart needs matplotlib: pip install 'vllm-hwplugin[bench]'") from None
    matplotlib.use("Agg")
    # The same results give the same file: no random ids, no date.
    matplotlib.rcParams["svg.hashsalt"] = "vllm-hwplugin"
    from matplotlib import pyplot

    bars: dict[str, dict[int, float]] = {}
    marks: dict[str, dict[int, float]] = {}
    for results in files:
        for row in rows(results):
            group = f"{row.label}\nvLLM {results['host']['vllm']}"
            for drawn_as, side in ((bars, "patched"), (marks, "mrv2")):
                ratio = row.ratio(side)
                if ratio is not None:
                    drawn_as.setdefault(group, {})[int(row.batch)] = ratio
    if not bars:
        raise ChartError("no case has both a stock and a patched measurement")
    batches = sorted({batch for group in bars.values() for batch in group})
    width = 0.8 / len(batches)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.8 * len(bars)), 4.0), layout="constrained")
    marked = False
    for place, batch in enumerate(batches):
        groups = [(at, group[batch]) for at, group in enumerate(bars.values()) if batch in group]
        offset = (place - (len(batches) - 1) / 2) * width
        drawn = axes.bar([at + offset for at, _ in groups], [r for _, r in groups], width, label=f"batch {batch}")
        axes.bar_label(drawn, fmt="%.2f", fontsize=7)
        points = [(at + offset, marks[g][batch]) for at, g in enumerate(bars) if batch in marks.get(g, {})]
        if points:
            label = None if marked else "Model Runner V2, stock"
            axes.plot(*zip(*points, strict=True), "kD", markersize=4, markerfacecolor="white", label=label)
            marked = True
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=8)
    axes.set_ylabel("tokens/s, patched / stock")
    figure.legend(loc="outside upper center", ncols=len(batches) + marked, frameon=False)  # inside it would hide bars
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
