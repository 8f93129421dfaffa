# SPDX-License-Identifier: Apache-2.0
"""The results of ``bench serve`` as one HTML file that opens from disk, and the drawings in it.

The extra ``lab`` has matplotlib, which draws them. Nothing else here imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from .serve import LATENCIES, Measured, groups
from .table import SIDE_NAMES

#: Told apart by those who do not see red and green, too.
COLOURS = {
    "stock": "#b0b0b0",
    "plugin": "#56b4e9",
    "patched": "#0072b2",
    "mrv2": "#e69f00",
    "mrv2-plugin": "#f0e442",
    "mrv2-patched": "#009e73",
    "server": "#0072b2",
}
#: The same results give the same file: no random ids, no date, and text as text, which can be searched too.
matplotlib.rcParams.update({"svg.hashsalt": "vllm-hwplugin", "svg.fonttype": "none", "font.size": 8})
#: 900 pixels of 96 to the inch.
WIDTH = 9.375
_Load = Mapping[str, Any]


def svg(figure: Figure, title: str) -> str:
    """A drawing as text that begins with the element ``svg``; ``title`` says what it shows to who cannot see it."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Title": title})
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join(lines).partition("<svg")[2].join(("<svg", "\n"))


def panels(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    """A drawing as wide as a page, and its axes as a matrix; ``height`` of a row in inches."""
    figure = Figure(figsize=(WIDTH, 0.5 + height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def throughput(results: Mapping[str, Any]) -> str:
    """Tokens/s by requests at once, a panel for each k and temperature."""
    found = list(groups(results))
    figure, axes = panels(-(-len(found) // 2), min(len(found), 2), 2.6)
    for panel, (name, loads) in zip(axes.flat, found, strict=False):
        for side, points in _sides(loads):
            speeds = [load["tokens_per_second"] for _, load in points]
            lowest = [one["best"] - min(one["all"]) for one in speeds]
            places, best = [at for at, _ in points], [one["best"] for one in speeds]
            style = {"color": COLOURS[side], "marker": "o", "capsize": 3, "label": SIDE_NAMES[side]}
            panel.errorbar(places, best, [lowest, [0] * len(lowest)], **style)
        _finish(panel, name, "tokens/s, best to slowest round")
        panel.legend(frameon=False)
    return svg(figure, "Throughput by requests at once")


def latencies(results: Mapping[str, Any]) -> str:
    """P50 and P99 of each latency, a row of panels for each k and temperature."""
    found = list(groups(results))
    figure, axes = panels(len(found), len(LATENCIES), 2.4)
    for row, (name, loads) in zip(axes, found, strict=True):
        for panel, latency in zip(row, LATENCIES, strict=True):
            for side, points in _sides(loads):
                for percentile, line in (("p50", "-"), ("p99", ":")):
                    known = [(at, load[latency][percentile]) for at, load in points if load[latency]]
                    label = f"{SIDE_NAMES[side]}, {percentile.upper()}"
                    panel.plot(*zip(*known, strict=True), line, color=COLOURS[side], marker=".", label=label)
            _finish(panel, latency[:-3].upper(), "ms")
        row[0].set_ylabel(f"{name}\nms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(figure, "Latencies by requests at once")


def page(results: Mapping[str, Any], shown: Console) -> str:
    """The HTML file.

    Args:
        results: of ``bench serve``.
        shown: a console that has recorded what the command shows: tables and verdicts.
    """
    host, settings = results["host"], results["settings"]
    facts = {
        "device": host["name"] + (f", driver {host['driver']}" if host["driver"] else ""),
        "software": f"vLLM {host['vllm']}, torch {host['torch']}, vllm-hwplugin {results['plugin']}",
        "commit, date": f"{results['commit']}, {results['date']}",
        **{name.replace("_", " "): value for name, value in settings.items() if value not in (None, [], {}, "")},
    }
    for name, what in LATENCIES.items():
        shown.print(f"{name[:-3].upper()} is the {what}.", highlight=False)
    for name, value in facts.items():
        shown.print(f"{name}: {value}", markup=False, highlight=False)
    title = "<title>vllm-hwplugin bench serve</title>"
    text = shown.export_html(inline_styles=True).replace("<head>", f"<head>{title}", 1)
    return text.replace("<body>", f"<body>{throughput(results)}{latencies(results)}", 1)


def _sides(loads: Iterable[Measured]) -> Iterator[tuple[str, list[tuple[str, _Load]]]]:
    """Side -> its loads and their names."""
    for side in SIDE_NAMES:
        if points := [(at, load) for at, one, load in loads if one == side]:
            yield side, points


def _finish(panel: Any, title: str, measure: str) -> None:
    panel.set_title(title, fontsize=8)
    panel.set_xlabel("requests at once")
    panel.set_ylabel(measure)
    panel.set_ylim(0)
