# SPDX-License-Identifier: Apache-2.0
"""The drawings of the pages, in the style of the report of ``bench serve``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
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
#: Verdict in docs/compatibility.md -> name and colour.
_VERDICTS = {
    "-": ("not needed", "#f0f0f0"),
    "upstream": ("upstream", "#c0e0f4"),
    "✅": ("applies", "#009e73"),
}
_ELSE = ("off", "#d55e00")
_REASONS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#cc79a7", "#f0e442")
#: Label of a step that a fast path was not asked for.
_ABSENT = "another path"


def steps(cases: Sequence[Gain]) -> str:
    """Draw a panel for each target, drafter and vLLM.

    A group of bars is a batch size, a bar a side's milliseconds a step. The line across a group is the GPU's time in a
    step, the least that a step can take. Two panels stand in a row, so that labels are legible at a width of 900
    pixels.
    """
    figure, axes = panels(-(-len(cases) // _COLUMNS), _COLUMNS, 2.1)
    handles: dict[str, Any] = {}
    for number, panel in enumerate(axes.flat):
        if number < len(cases):
            handles |= _draw(panel, cases[number])
        else:
            panel.set_axis_off()
    names = [name for name in (*SIDE_NAMES.values(), _FLOOR) if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)
    return svg(figure, "Milliseconds a step by batch size and side; less is better")


def idle_and_gain(cases: Sequence[Gain]) -> str:
    """Draw a dot per case and batch size: idle share and gain."""
    figure, axes = panels(1, 1, 3.4)
    panel = axes[0][0]
    targets = list(dict.fromkeys(case.target for case in cases))
    for side, stock in STOCK_OF.items():
        for marker, target in zip(cycle(_MARKERS), targets, strict=False):
            dots = [
                (idle, row.ratio(side, stock))
                for case in cases
                for row in case.rows
                if case.target == target and (idle := (row.sides.get(stock) or {}).get("gpu_idle_share")) is not None
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
    panel.set_xlabel(f"share of unpatched vLLM's step in which the GPU waits for the host\n{_conditions(cases)}")
    panel.set_ylabel("speedup, tokens/s over unpatched vLLM")
    panel.legend(frameon=False)
    return svg(figure, "What the plugin gains, by the idle time of unpatched vLLM's GPU")


def compatibility(page: str) -> str:
    """Draw docs/compatibility.md's table as a map of features and versions."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    (_, *versions), *features = lines
    verdicts = [[_VERDICTS.get(cell, _ELSE) for cell in cells] for _, *cells in features]
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
    panel.set_xlabel("vLLM; the patches of both model runners against the released text, no device")
    figure.legend(loc="outside upper center", ncols=len(_VERDICTS) + 1, frameon=False)
    return svg(figure, "Which feature applies to which version of vLLM")


def step_in_time(files: Sequence[Found]) -> str:
    """Draw each side's step: parts on the host, GPU time."""
    engines = [engine for file in files for engine in file.results["engines"] if engine["profile"].get("gpu_busy_ms")]
    engines = [engine for engine in engines if engine["batch"] == min(other["batch"] for other in engines)]
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
    names = [SIDE_NAMES[engine["side"]] for engine in engines]
    panel.set_yticks(range(len(engines)), names)
    told = "; ".join(dict.fromkeys(map(_measured, files)))
    panel.set_xlabel(f"ms, {_FLOOR} by torch's profiler in a separate run; {told}")
    panel.set_ylim(len(engines) - 0.5, -0.6)
    panel.margins(x=0.25)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return svg(figure, "A step on the host, part by part, and on the GPU")


def served(file: Found, side: str) -> str:
    """Draw each fast path's share of a load's steps, and reasons."""
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
    return svg(figure, "Which steps of a served load the plugin's fast paths ran")


_FLOOR = "GPU busy"


def _conditions(cases: Sequence[Gain]) -> str:
    """Return the devices, versions, drafters and days of cases."""
    devices, days = sorted({case.file.device for case in cases}), sorted({case.file.day for case in cases})
    versions, drafters = sorted({case.vllm for case in cases}), sorted({case.drafter for case in cases})
    day = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{' or '.join(devices)}, vLLM {', '.join(versions)}, {', '.join(drafters)}, {day}"


def _measured(file: Found) -> str:
    """Return what a drawing shows: device, vLLM, file and date."""
    return f"{file.device}, vLLM {file.vllm}, {file.name.removesuffix('.json')}, {file.results['date'][:10]}"


def _label(value: float) -> str:
    # Three digits fit above a bar.
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _draw(panel: Any, case: Gain) -> dict[str, Any]:
    """Draw one case; return the legend's entries by name."""
    handles: dict[str, Any] = {}
    sides = [side for side in COLOURS if any(row.sides.get(side) for row in case.rows)]
    width = _GROUP / len(sides)
    for place, side in enumerate(sides):
        offset = (place - (len(sides) - 1) / 2) * width
        steps = [(at + offset, step_ms(row.sides.get(side))) for at, row in enumerate(case.rows)]
        known = [bar for bar in steps if bar[1] is not None]
        bars = panel.bar(*zip(*known, strict=True), width, color=COLOURS[side])
        panel.bar_label(bars, fmt=_label, fontsize=6, padding=1)
        handles[SIDE_NAMES[side]] = bars
    for at, row in enumerate(case.rows):
        if (busy := case.gpu_busy_ms(row)) is not None:
            line = panel.hlines(busy, at - _GROUP / 2, at + _GROUP / 2, color="black", linewidth=1.2)
            handles[_FLOOR] = line
    panel.set_title(f"{case.target}, {case.drafter}, vLLM {case.vllm}\n{case.file.device}, {case.file.day}", fontsize=8)
    panel.set_xticks(range(len(case.rows)), [f"batch {row.batch}" for row in case.rows])
    panel.set_ylabel("ms a step")
    panel.margins(y=0.12)
    return handles
