# SPDX-License-Identifier: Apache-2.0
"""The chart of docs/benchmarks.md: a panel a target, drafter and vLLM, with a group of bars a batch size.

A bar is a side's milliseconds a step. The line across a group is how long the GPU works in a step, below which no host
can bring it. Two panels stand side by side, so that the labels can be read where the page is 900 pixels wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib import pyplot

from vllm_hwplugin_lab.bench import SIDE_NAMES, step_ms

from ._gains import Gain

#: The same results give the same file: no random ids, no date, and text as text, which can be searched too.
_SETTINGS = {"svg.hashsalt": "vllm-hwplugin", "svg.fonttype": "none", "font.size": 8}
#: 900 pixels of 96 to the inch.
_WIDTH = 9.375
_PANEL_HEIGHT = 2.1
_COLUMNS = 2
#: Told apart by those who do not see red and green, too.
_COLOURS = {"stock": "#b0b0b0", "patched": "#0072b2", "mrv2": "#e69f00", "mrv2-patched": "#009e73"}
_GROUP = 0.86


def drawing(found: Sequence[Gain]) -> str:
    """All cases as one SVG."""
    matplotlib.use("Agg")
    rows = -(-len(found) // _COLUMNS)
    with matplotlib.rc_context(_SETTINGS):
        figure, axes = pyplot.subplots(
            rows, _COLUMNS, figsize=(_WIDTH, 0.5 + _PANEL_HEIGHT * rows), layout="constrained", squeeze=False
        )
        handles: dict[str, Any] = {}
        for number, panel in enumerate(axes.flat):
            if number < len(found):
                handles |= _draw(panel, found[number])
            else:
                panel.set_axis_off()
        names = [name for name in (*SIDE_NAMES.values(), _FLOOR) if name in handles]
        figure.legend(
            [handles[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False
        )
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


_FLOOR = "GPU busy"


def _label(value: float) -> str:
    """Three digits are what fits above a bar."""
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _draw(panel: Any, one: Gain) -> dict[str, Any]:
    """One case; returns what the legend shows, by name."""
    handles: dict[str, Any] = {}
    sides = [side for side in _COLOURS if any(row.sides.get(side) for row in one.rows)]
    width = _GROUP / len(sides)
    for place, side in enumerate(sides):
        offset = (place - (len(sides) - 1) / 2) * width
        steps = [(at + offset, step_ms(row.sides.get(side))) for at, row in enumerate(one.rows)]
        known = [bar for bar in steps if bar[1] is not None]
        bars = panel.bar(*zip(*known, strict=True), width, color=_COLOURS[side])
        panel.bar_label(bars, fmt=_label, fontsize=6, padding=1)
        handles[SIDE_NAMES[side]] = bars
    for at, row in enumerate(one.rows):
        if (busy := one.gpu_busy_ms(row)) is not None:
            line = panel.hlines(busy, at - _GROUP / 2, at + _GROUP / 2, color="black", linewidth=1.2)
            handles[_FLOOR] = line
    panel.set_title(f"{one.target}, {one.drafter}, vLLM {one.vllm}", fontsize=8)
    panel.set_xticks(range(len(one.rows)), [f"batch {row.batch}" for row in one.rows])
    panel.set_ylabel("ms a step")
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    return handles
