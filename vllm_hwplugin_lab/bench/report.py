# SPDX-License-Identifier: Apache-2.0
"""The results of ``bench serve`` as one HTML page that opens from disk, with its plots.

They need matplotlib, which the extra ``lab`` installs. No other module here imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .plan import TINY
from .running import in_words, servers
from .serve import LATENCIES, Measured, frontend, groups, tables
from .table import SIDE_NAMES, Compared, headline, reasons

#: A palette that is also readable with red-green colour blindness.
COLOURS = {
    "stock": "#b0b0b0",
    "plugin": "#56b4e9",
    "patched": "#0072b2",
    "mrv2": "#e69f00",
    "mrv2-plugin": "#f0e442",
    "mrv2-patched": "#009e73",
    "server": "#0072b2",
    "before": "#b0b0b0",
    "after": "#0072b2",
}
#: Same results, same file: no random ids and no date. Text stays text, so that it can be searched.
matplotlib.rcParams.update({"svg.hashsalt": "vllm-hwplugin", "svg.fonttype": "none", "font.size": 8})
#: Inches: 900 pixels at 96 per inch.
WIDTH = 9.375
_Load = Mapping[str, Any]
_LATENCIES_SHOWN = "Latencies in milliseconds by concurrency: P50 as lines, P99 dotted; the table has each figure."
#: Plots are dark on white, so they keep a white background in the dark scheme.
_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --ground: #fff; --text: #1a1a1a; --soft: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --ground: #161616; --text: #e6e6e6; --soft: #242424; } }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
p, li, figcaption { max-width: 48rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .5rem 0 1rem; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: bottom; }
th { background: var(--soft); overflow-wrap: normal; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; overflow-wrap: normal; }
figure { margin: 1.5rem 0; }
figure svg { display: block; width: 100%; max-width: 900px; height: auto; background: #fff; }
figcaption, .note { font-size: .9rem; margin: .4rem 0 0; }
@page { size: landscape; }
@media print {
  main { max-width: none; padding: 0; }
  table { font-size: 7.5pt; }
  figure, tr { break-inside: avoid; }
  .wide { overflow: visible; }
}
"""


def svg(figure: Figure, title: str) -> str:
    """Return a plot as an ``svg`` element; screen readers read ``title``."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Title": title})
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join(lines).partition("<svg")[2].join(("<svg", "\n"))


def panels(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    """Return a page-wide plot and its axes; ``height`` per row in inches."""
    figure = Figure(figsize=(WIDTH, 0.5 + height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def throughput(results: Mapping[str, Any]) -> str:
    """Plot tokens/s by concurrency, a panel per case and temperature."""
    cases = list(groups(results))
    figure, axes = panels(-(-len(cases) // 2), min(len(cases), 2), 2.6)
    for panel, (name, loads) in zip(axes.flat, cases, strict=False):
        for side, points in _sides(loads):
            speeds = [load["tokens_per_second"] for _, load in points]
            places, best = [at for at, _ in points], [speed["best"] for speed in speeds]
            panel.plot(places, best, color=COLOURS[side], marker="o", label=SIDE_NAMES[side])
            panel.fill_between(places, [min(speed["all"]) for speed in speeds], best, color=COLOURS[side], alpha=0.25)
        _finish(panel, name, "tokens/s")
        panel.legend(frameon=False)
    return svg(figure, "Throughput by concurrency")


def latencies(results: Mapping[str, Any]) -> str:
    """Plot latencies' P50 and P99, a row per case and temperature."""
    cases = list(groups(results))
    figure, axes = panels(len(cases), len(LATENCIES), 2.4)
    for row, (name, loads) in zip(axes, cases, strict=True):
        for panel, latency in zip(row, LATENCIES, strict=True):
            for side, points in _sides(loads):
                for percentile, line in (("p50", "-"), ("p99", ":")):
                    # A gap where no request was answered.
                    values = [load[latency][percentile] if load[latency] else math.nan for _, load in points]
                    label = f"{SIDE_NAMES[side]}, {percentile.upper()}"
                    places = [at for at, _ in points]
                    panel.plot(places, values, line, color=COLOURS[side], marker=".", label=label)
            _finish(panel, latency[:-3].upper(), "ms")
        row[0].set_ylabel(f"{name}\nms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return svg(figure, "Latencies by concurrency")


def page(results: Mapping[str, Any], verdicts: Sequence[Compared]) -> str:
    """Return the HTML page of results of ``bench serve`` and their verdicts."""
    title = "; ".join(map(headline, verdicts)) or "No verdict: nothing was compared"
    device = results.get("host", {}).get("device")
    lines = "".join(
        f"<p>{_text(' '.join(why))}</p>\n" for verdict in verdicts if (why := list(reasons(verdict, device)))
    )
    parts = (part for name, loads in groups(results) for part in _group(name, loads))
    sentences = "".join(f"<li>{_text(sentence)}</li>" for sentence in _settings(results))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{lines}{''.join(parts)}"
        f"{_figure(throughput(results), _throughput_in_words(results))}{_figure(latencies(results), _LATENCIES_SHOWN)}"
        f"<h2>What was measured</h2>\n<ul>{sentences}</ul>\n</main>\n</body>\n</html>\n"
    )


def _text(sentence: str) -> str:
    """Convert a sentence with names in backquotes to HTML."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _group(name: str, loads: Sequence[Measured]) -> Iterator[str]:
    """Yield a case's tables: its loads' figures, then what explains them."""
    first, *rest = tables(loads)
    yield f"<h2>{escape(name)}</h2>\n{_table(*first)}"
    yield "<h3>Conditions, and where the time goes</h3>\n"
    yield from (_table(*table) for table in rest)


def _table(text: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>\n" for line in lines)
    return (
        f'<p class="note">{_text(text)}</p>\n<div class="wide"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _figure(drawing: str, summary: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(summary)}</figcaption></figure>\n"


def _throughput_in_words(results: Mapping[str, Any]) -> str:
    """Describe the plot of tokens/s for people who cannot see it."""
    sentences = [
        f"{name}: {', '.join(f'{values} at {at}' for at, values in _best(loads).items())}."
        for name, loads in groups(results)
    ]
    return " ".join(
        ["Tokens/s of the best round by concurrency; a band reaches down to the slowest round.", *sentences]
    )


def _best(loads: Iterable[Measured]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for at, side, load in loads:
        values.setdefault(at, []).append(f"{SIDE_NAMES[side]} {load['tokens_per_second']['best']:.0f}")
    return {at: ", ".join(parts) for at, parts in values.items()}


def _settings(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the load, the servers and the client."""
    settings = results["settings"]
    yield _prompts(settings)
    yield (
        f"Concurrency {_listed(settings['concurrency'], 'unbounded')}; requests a second "
        f"{_listed(settings['request_rate'], 'unbounded')}; temperature {_listed(settings['temperature'])}; "
        f"{settings['rounds']} rounds of each load; seed {settings['seed']}."
    )
    if settings["client"]:
        yield f"More arguments of vLLM's client: {' '.join(settings['client'])}."
    if "host" in results:
        yield from _engines(results)
    else:
        client = results["client"]
        yield f"Server at {settings['url']}: {settings['checkpoint']} as {settings['model']}."
        for side, entry in servers(results):
            yield f"Reported by the server ({SIDE_NAMES[side]}): {in_words(entry)}. Its other settings are unknown."
        yield (
            f"Measured by vllm-hwplugin {client['vllm-hwplugin']} with the client of vLLM {client['vllm']}, "
            f"{_dates(results)}."
        )
    yield "".join(f"{name[:-3].upper()}: {definition}. " for name, definition in LATENCIES.items()).strip()


def _prompts(settings: Mapping[str, Any]) -> str:
    answers = f"answers of at most {settings['output_len']} tokens"
    if settings["prompts"] is not None:
        chat = " through the chat template" if settings["chat"] else ""
        return f"Prompts: the file {settings['prompts']}{chat}; {answers}."
    if settings.get("shape") == TINY:
        return f"Prompts: from the tiny checkpoints; {answers}."
    spread = f", lengths within {settings['range_ratio']:.0%}" if settings["range_ratio"] else ""
    return f"Prompts: {settings['input_len']} random tokens; {answers}{spread}."


def _engines(results: Mapping[str, Any]) -> Iterator[str]:
    host, settings = results["host"], results["settings"]
    driver = f" (driver {host['driver']})" if host["driver"] else ""
    yield (
        f"{host['name']}{driver}, vLLM {host['vllm']}, torch {host['torch']}, vllm-hwplugin {results['plugin']}"
        f"{' at ' + results['commit'] if results['commit'] else ''}; {results['date'][:10]}."
    )
    target = settings["target"] if settings["shape"] is None else f"the shape {settings['shape']}"
    drafter = f" with the drafter {settings['draft']}" if settings["draft"] else ""
    yield (
        f"Engines: {target}{drafter}, method {settings['method']}; cudagraph_mode {settings['cudagraph_mode']}; tensor "
        f"parallel size {settings['tensor_parallel_size']}; {frontend(settings)}."
    )
    for whose, name in (("All engines", "vllm_environment"), ("Patched engines", "patched_environment")):
        if settings[name]:
            yield f"{whose} had {', '.join(f'{key}={value}' for key, value in settings[name].items())}."
    if settings["vllm_arguments"]:
        yield f"Engine arguments: {', '.join(f'{key}={value}' for key, value in settings['vllm_arguments'].items())}."


def _listed(values: Iterable[float], zero: str = "0") -> str:
    return ", ".join(f"{value:g}" if value else zero for value in values)


def _dates(results: Mapping[str, Any]) -> str:
    if "dates" not in results:
        return _minute(results["date"])
    return " and ".join(f"{_minute(date)} ({name})" for name, date in results["dates"].items())


def _minute(date: str) -> str:
    return f"{date[:16].replace('T', ' ')} UTC"


def _sides(loads: Iterable[Measured]) -> Iterator[tuple[str, list[tuple[str, _Load]]]]:
    """Yield each side with its loads and their concurrencies."""
    for side in SIDE_NAMES:
        if points := [(at, load) for at, measured_side, load in loads if measured_side == side]:
            yield side, points


def _finish(panel: Any, title: str, measure: str) -> None:
    panel.set_title(title, fontsize=8)
    panel.set_xlabel("concurrency")
    panel.set_ylabel(measure)
    panel.set_ylim(0)
