# SPDX-License-Identifier: Apache-2.0
"""The results of ``bench serve`` as one HTML file that opens from disk, and the drawings in it.

The extra ``lab`` has matplotlib, which draws them. Nothing else here imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ._step_kinds import KINDS
from ._table import SIDE_NAMES
from ._verdict import of_loads, verdict
from .serve import LATENCIES, Measured, groups, tables

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
_KIND_COLOURS = dict(zip(KINDS, ("#009e73", "#56b4e9", "#f0e442", "#d55e00"), strict=True))
#: 900 pixels of 96 to the inch.
WIDTH = 9.375
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:75em;margin:2em auto;padding:0 1em}table{border-collapse:collapse;"
    "margin:1em 0}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
    "svg{display:block;max-width:100%;height:auto}.verdict{font-size:1.2em}"
)

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


def kinds(results: Mapping[str, Any]) -> str | None:
    """Shares of the steps and of their time by kind, a bar a load and side; None where nobody looked at steps."""
    found = [(name, loads) for name, loads in groups(results) if any(load["kinds"] for *_, load in loads)]
    if not found:
        return None
    bars = max(len(loads) for _, loads in found)
    figure, axes = panels(len(found), 2, 0.8 + 0.22 * bars)
    for row, (name, loads) in zip(axes, found, strict=True):
        labels = [f"{at}, {SIDE_NAMES[side]}" for at, side, _ in loads][::-1]
        for panel, (part, said) in zip(row, (("steps", "of the steps"), ("seconds", "of their time")), strict=True):
            before = [0.0] * len(loads)
            for kind, called in KINDS.items():
                shares = [_share(load, kind, part) for *_, load in loads][::-1]
                panel.barh(labels, shares, left=before, color=_KIND_COLOURS[kind], label=called)
                before = [one + more for one, more in zip(before, shares, strict=True)]
            panel.set_title(f"{name}: shares {said}", fontsize=8)
            panel.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), frameon=False)
    return svg(figure, "Shares of the steps and of their time by kind")


def page(results: Mapping[str, Any]) -> str:
    """The HTML file."""
    host, settings = results["host"], results["settings"]
    facts = {
        "device": host["name"] + (f", driver {host['driver']}" if host["driver"] else ""),
        "software": f"vLLM {host['vllm']}, torch {host['torch']}, vllm-hwplugin {results['plugin']}",
        "commit, date": f"{results['commit']}, {results['date']}",
        **{name.replace("_", " "): value for name, value in settings.items() if value not in (None, [], {}, "")},
    }
    drawn = filter(None, (throughput(results), latencies(results), kinds(results)))
    names = (f"{name[:-3].upper()} is the {what}" for name, what in LATENCIES.items())
    said = [verdict(one, host["device"]) for case in results["cases"] for one in of_loads(case)]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>vllm-hwplugin bench serve</title>",
        f"<style>{_STYLE}</style><h1>vllm-hwplugin bench serve</h1>",
        *(f"<p class=verdict>{escape(line)}</p>" for line in said),
        *drawn,
        f"<p>{'; '.join(names)}.</p>",
        *(part for one in groups(results) for part in _chapter(*one)),
        "<h2>How it was measured</h2>",
        _table((), ((name, str(value)) for name, value in facts.items())),
    ]
    return "\n".join(parts) + "\n"


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


def _share(load: _Load, kind: str, part: str) -> float:
    total = sum(row[part] for row in load["kinds"])
    return sum(row[part] for row in load["kinds"] if row["kind"] == kind) / total if total else 0.0


def _chapter(name: str, loads: Sequence[Measured]) -> Iterator[str]:
    """The tables that the command shows, too."""
    yield f"<h2>{escape(name)}</h2>"
    for told, columns, lines in tables(loads):
        yield f"<p>{escape(told)}</p>{_table(columns, lines)}"


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in line)}" for line in lines)
    return f"<table><tr>{head}{body}</table>"
