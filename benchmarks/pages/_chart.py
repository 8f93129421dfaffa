# SPDX-License-Identifier: Apache-2.0
"""The drawings of the pages, drawn as the report of ``bench serve`` draws its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps

from vllm_hwplugin.spec_decode.step_counts import SERVED
from vllm_hwplugin_lab.bench.plan import STOCK_OF
from vllm_hwplugin_lab.bench.report import COLOURS, panels, svg
from vllm_hwplugin_lab.bench.serve import groups
from vllm_hwplugin_lab.bench.table import SIDE_NAMES, step_ms

from ._gains import Gain
from ._host_time import parts_us
from ._read import Found

_COLUMNS = 2
_GROUP = 0.86
_RUNNERS = {"patched": "V1", "mrv2-patched": "V2"}
_MARKERS = ("o", "s", "^", "D", "v")
#: Verdict of the drift check, as its page has it -> what it is called, its colour; a number is the last.
_VERDICTS = {
    "-": ("not needed", "#f0f0f0"),
    "upstream": ("upstream", "#c0e0f4"),
    "exact": ("applies", "#009e73"),
}
_ELSE = ("off", "#d55e00")
_REASONS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#cc79a7", "#f0e442")
#: Of a step that a fast path was not asked for.
_ABSENT = "another path"


def steps(found: Sequence[Gain]) -> str:
    """A panel a target, drafter and vLLM, with a group of bars a batch size.

    A bar is a side's milliseconds a step. The line across a group is how long the GPU works in a step, below which no
    host can bring it. Two panels stand side by side, so that the labels can be read where the page is 900 pixels wide.
    """
    figure, axes = panels(-(-len(found) // _COLUMNS), _COLUMNS, 2.1)
    handles: dict[str, Any] = {}
    for number, panel in enumerate(axes.flat):
        if number < len(found):
            handles |= _draw(panel, found[number])
        else:
            panel.set_axis_off()
    names = [name for name in (*SIDE_NAMES.values(), _FLOOR) if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)
    return svg(figure, "Milliseconds a step by batch size and side; less is better")


def idle_and_gain(found: Sequence[Gain]) -> str:
    """A dot a case and batch size: share of stock's step in which the GPU waits, and what the plugin gains."""
    figure, axes = panels(1, 1, 3.4)
    panel = axes[0][0]
    targets = list(dict.fromkeys(one.target for one in found))
    for side, stock in STOCK_OF.items():
        for marker, target in zip(_MARKERS, targets, strict=False):
            dots = [
                (idle, row.ratio(side, stock))
                for one in found
                for row in one.rows
                if one.target == target and (idle := (row.sides.get(stock) or {}).get("gpu_idle_share")) is not None
                if row.ratio(side, stock) is not None
            ]
            if dots:
                label = f"{target}, {_RUNNERS[side]}"
                style = {"color": COLOURS[side], "edgecolors": "none", "alpha": 0.8, "marker": marker, "label": label}
                panel.scatter(*zip(*dots, strict=True), **style)
    shares = [share / 100 for share in range(75)]
    line = [1 / (1 - share) for share in shares]
    panel.plot(shares, line, color="#888888", linewidth=0.8, label="if the GPU never waited")
    panel.xaxis.set_major_formatter("{x:.0%}")
    panel.set_xlabel("share of stock vLLM's step in which the GPU waits for the host")
    panel.set_ylabel("speedup, tokens/s over stock's")
    panel.legend(frameon=False)
    return svg(figure, "What the plugin gains, by how long stock vLLM's GPU waits")


def compatibility(page: str) -> str:
    """docs/compatibility.md's table as a map of features and versions."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    (_, *versions), *features = lines
    verdicts = [[_VERDICTS.get("exact" if cell.isdigit() else cell, _ELSE) for cell in cells] for _, *cells in features]
    figure, axes = panels(1, 1, 0.16 * len(features) + 0.6)
    panel = axes[0][0]
    for name, colour in dict.fromkeys(verdict for row in verdicts for verdict in row):
        places = [
            (at, y) for y, row in enumerate(verdicts) for at, verdict in enumerate(row) if verdict == (name, colour)
        ]
        panel.scatter(*zip(*places, strict=True), s=90, marker="s", color=colour, label=name)
    panel.set_xticks(range(len(versions)), versions, rotation=45)
    panel.set_yticks(range(len(features)), [name.partition("`")[2].partition("`")[0] for name, *_ in features])
    panel.set_ylim(len(features) - 0.4, -0.6)
    figure.legend(loc="outside upper center", ncols=len(_VERDICTS) + 1, frameon=False)
    return svg(figure, "Which feature applies to which version of vLLM")


def step_in_time(files: Sequence[Found]) -> str:
    """What the host does in a step, part after part, and how long the GPU works in it; a pair of bars for each side."""
    engines = [one for file in files for one in file.results["engines"] if one["profile"].get("gpu_busy_ms")]
    engines = [one for one in engines if one["batch"] == min(other["batch"] for other in engines)]
    figure, axes = panels(1, 1, 0.8 + 0.55 * len(engines))
    panel = axes[0][0]
    for y, engine in enumerate(engines):
        at = 0.0
        for number, (part, us) in enumerate(parts_us(engine["phases"]).items()):
            label = "" if y else part.partition(";")[0].replace("`", "")
            panel.barh(y - 0.2, us / 1e3, 0.36, left=at, color=colormaps["tab20"](number), label=label)
            at += us / 1e3
        profile = engine["profile"]
        panel.barh(y + 0.2, profile["gpu_busy_ms"], 0.3, color="black", label="" if y else _FLOOR)
        told = f" {profile['graph_launches']:g} graphs and {profile['kernel_launches']:g} kernels launched"
        panel.text(at, y - 0.2, told, va="center", fontsize=7)
    names = [SIDE_NAMES[engine["side"]].replace("MRV2", "V2") for engine in engines]
    panel.set_yticks(range(len(engines)), names)
    told = "; ".join(dict.fromkeys(map(_measured, files)))
    panel.set_xlabel(f"ms, {_FLOOR} by torch's profiler in a separate run; {told}")
    panel.set_ylim(len(engines) - 0.5, -0.6)
    panel.margins(x=0.25)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return svg(figure, "A step on the host, part by part, and on the GPU")


def served(file: Found, side: str) -> str:
    """How much of a live load's steps each fast path of a side served, a bar a load and path; why not the others."""
    bars = [
        (f"concurrency {at}, {path}", load["kinds"], path)
        for _, loads in groups(file.results)
        for at, of, load in loads
        if of == side
        for path in dict.fromkeys(path for row in load.get("kinds", ()) for path in row["paths"])
    ]
    figure, axes = panels(1, 1, 0.5 + 0.17 * len(bars))
    panel = axes[0][0]
    colours: dict[str, Any] = {SERVED: COLOURS["mrv2-patched"], _ABSENT: "#f0f0f0"}
    for y, (_, rows_of, path) in enumerate(bars):
        total, at = sum(row["steps"] for row in rows_of), 0.0
        for outcome in dict.fromkeys((SERVED, *(row["paths"].get(path, _ABSENT) for row in rows_of))):
            share = sum(row["steps"] for row in rows_of if row["paths"].get(path, _ABSENT) == outcome) / total
            colour = colours.setdefault(outcome, _REASONS[len(colours) % len(_REASONS)])
            panel.barh(y, share, left=at, color=colour)
            at += share
    for outcome, colour in colours.items():
        panel.barh(0, 0, color=colour, label=outcome.replace("_", " "))
    panel.set_yticks(range(len(bars)), [name for name, *_ in bars])
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.xaxis.set_major_formatter("{x:.0%}")
    panel.set_xlabel(f"of the steps; {_RUNNERS[side]}, {_measured(file)}")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return svg(figure, "Which steps of a live load the plugin's fast paths served")


_FLOOR = "GPU busy"


def _measured(file: Found) -> str:
    """What a drawing is of, to stand in it."""
    return f"{file.device}, vLLM {file.vllm}, {file.name.removesuffix('.json')}, {file.results['date'][:10]}"


def _label(value: float) -> str:
    """Three digits are what fits above a bar."""
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _draw(panel: Any, one: Gain) -> dict[str, Any]:
    """One case; returns what the legend shows, by name."""
    handles: dict[str, Any] = {}
    sides = [side for side in COLOURS if any(row.sides.get(side) for row in one.rows)]
    width = _GROUP / len(sides)
    for place, side in enumerate(sides):
        offset = (place - (len(sides) - 1) / 2) * width
        steps = [(at + offset, step_ms(row.sides.get(side))) for at, row in enumerate(one.rows)]
        known = [bar for bar in steps if bar[1] is not None]
        bars = panel.bar(*zip(*known, strict=True), width, color=COLOURS[side])
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
    return handles
