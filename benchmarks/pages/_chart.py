# SPDX-License-Identifier: Apache-2.0
"""The chart of docs/benchmarks.md: tokens/s by stock's, one group of bars a case, one bar a batch size.

The bars are the patched side; where Model Runner V2 was measured, a mark over each bar's middle is its ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import matplotlib
from matplotlib import pyplot

from ._gains import Gain

#: The same results give the same file: no random ids, no date, and text as text, which can be searched too.
_SETTINGS = {"svg.hashsalt": "vllm-hwplugin", "svg.fonttype": "none"}


def drawing(found: Sequence[Gain]) -> str:
    """All cases as one SVG."""
    matplotlib.use("Agg")
    groups = {f"{one.target}\n{one.drafter}\nvLLM {one.vllm}": one for one in found}
    batches = sorted({batch for one in groups.values() for batch in one.ratios()})
    width = 0.8 / len(batches)
    with matplotlib.rc_context(_SETTINGS):
        figure, axes = pyplot.subplots(figsize=(max(6.0, 1.5 * len(groups)), 4.0), layout="constrained")
        marked = False
        for place, batch in enumerate(batches):
            offset = (place - (len(batches) - 1) / 2) * width
            ratios = [(at + offset, one.ratios().get(batch)) for at, one in enumerate(groups.values())]
            bars = [bar for bar in ratios if bar[1] is not None]
            drawn = axes.bar(*zip(*bars, strict=True), width, label=f"batch {batch}")
            axes.bar_label(drawn, fmt="%.2f", fontsize=7)
            marks = [(at + offset, one.ratios("mrv2").get(batch)) for at, one in enumerate(groups.values())]
            if points := [mark for mark in marks if mark[1] is not None]:
                label = None if marked else "Model Runner V2, stock"
                axes.plot(*zip(*points, strict=True), "kD", markersize=4, markerfacecolor="white", label=label)
                marked = True
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        axes.set_ylabel("tokens/s, patched / stock")
        figure.legend(loc="outside upper center", ncols=len(batches) + marked, frameon=False)  # inside it hides bars
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
