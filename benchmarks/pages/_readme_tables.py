# SPDX-License-Identifier: Apache-2.0
"""Tables in pages that are written by hand: a feature's cost (docs/nwor.md), the time of a start (README.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from vllm_hwplugin_lab.bench import SHAPES
from vllm_hwplugin_lab.bench.plan import STOCK_OF
from vllm_hwplugin_lab.bench.table import between, host_line, rows

from ._read import Found
from ._text import paragraph, table

#: Side with the feature -> the plugin without it, and their runner.
_COST_SIDES = {"patched": ("plugin", "V1"), "mrv2-patched": ("mrv2-plugin", "V2")}
_COST_NAMES = ["vLLM", "target", "drafts", "model runner", "batch", "ms a step without", "with", "change"]
_COST_HOW = (
    "Times are of the best round, with the median in brackets. Sides took turns, each engine's core in its own "
    "process. Both have the plugin's defaults except for this feature."
)
_START_RUNNERS = {"stock": "V1", "mrv2": "V2"}
_START_NAMES = ["vLLM", "target", "drafts", "model runner", "KV blocks", "first start, s", "later start, s"]
_START_HOW = (
    "Unpatched vLLM → with the plugin, at vLLM's own memory share, concurrent requests and capture sizes. A later "
    "start has the device to itself, and filled caches. The first starts ran at the same time, and slowed each other. "
    "A second start compiles Triton's kernels again, also in unpatched vLLM: while vLLM compiles a model, Triton's "
    "cache is a folder of that model, and a start that loads the compiled model uses another folder. Kernels of the "
    "graphs that the plugin captures itself are cached for both. "
    "What larger capture sizes do to the KV cache is in [drafter-graphs.md](drafter-graphs.md#capture-sizes)."
)

_FEW = ", which may have compiled kernels for sizes that those before it did not have"


def costs(files: Sequence[Found]) -> str:
    """Return a table of what a feature costs, and its sources."""
    measured = (paragraph(f"`{file.name}`: {file.source}. {host_line(file.results)}") for file in files)
    return "\n\n".join(["\n".join(table(_COST_NAMES, _costs(files))), paragraph(_COST_HOW), *measured])


def starts(files: Sequence[Found]) -> str:
    """Return a table of what the plugin adds to a start."""
    if not files:
        return "What a start with the plugin takes longer was not measured."
    measured = (
        paragraph(
            f"`{file.name}`: {file.source}. Starts of each side before: {file.results['settings']['fills']}; "
            f"later ones: {_later(file)}{_FEW if _later(file) < 2 else ''}.{_host_of_starts(file)}"
        )
        for file in files
    )
    return "\n\n".join(["\n".join(table(_START_NAMES, _starts(files))), paragraph(_START_HOW), *measured])


def _sides(file: Found) -> list[Any]:
    return [side for case in file.results["cases"] for side in case["sides"].values()]


def _later(file: Found) -> int:
    """Return how many later starts each side has."""
    # A time limit may leave some out.
    return min(len(side["alone"]) for side in _sides(file))


def _host_of_starts(file: Found) -> str:
    times = [start["host_us"] for side in _sides(file) for start in side["alone"] if start.get("host_us")]
    # Older files have no time of the host.
    if not times:
        return ""
    return f" The same piece of Python took {min(times):.0f} to {max(times):.0f} us after the later ones."


def starts_in_short(files: Sequence[Found]) -> str:
    """Return README.md's sentence about starts, of the newest vLLM that was measured."""
    newest = max((Version(file.vllm) for file in files), default=None)
    recent = [file for file in files if Version(file.vllm) == newest]
    # A later file replaces what an earlier one has of the same engine.
    both = {
        tuple(_case(file, case, before["runner"])): (before, after)
        for file in sorted(recent, key=lambda file: str(file.results["date"]))
        for case in file.results["cases"]
        for before, after in _pairs(case)
    }.values()
    if not both:
        return "What a start with the plugin takes longer was not measured."
    seconds = between((round(after["seconds"] - before["seconds"]) for before, after in both), "+d")
    blocks = between((after["num_gpu_blocks"] / before["num_gpu_blocks"] - 1 for before, after in both), "+.1%")
    loaded = [file for file in recent if file.results.get("conditions")]
    where = f", {'in part ' if len(loaded) < len(recent) else ''}on a loaded machine," if loaded else ","
    return paragraph(
        f"With warm caches{where} startup time changes by {seconds} s and the number of KV cache blocks by {blocks}: "
        f"{len(both)} engines of vLLM {newest} on one {' or '.join(sorted({file.device for file in recent}))} "
        "([docs/benchmarks.md](docs/benchmarks.md#what-does-a-start-cost))."
    )


def _case(file: Found, case: Mapping[str, Any], runner: str) -> list[str]:
    drafts = f"{case['method']} k={case['k']}" if case["k"] else "none"
    return [file.vllm, SHAPES[case["shape"]].title, drafts, runner]


def _costs(files: Sequence[Found]) -> Iterator[list[str]]:
    for file, row in ((measured, row) for measured in files for row in rows(measured.results)):
        for side, (other, runner) in _COST_SIDES.items():
            with_it, without = row.sides.get(side), row.sides.get(other)
            if with_it is None or without is None or row.ratio(side, other) is None:
                continue
            ends = [(without["step_ms"][end], with_it["step_ms"][end]) for end in ("best", "median")]
            before, after = (f"{best:.2f} ({median:.2f})" for best, median in zip(*ends, strict=True))
            longer = [f"{more / less - 1:+.1%}" for less, more in ends]
            yield [*_case(file, row.case, runner), str(row.batch), before, after, f"{longer[0]} ({longer[1]})"]


def _starts(files: Sequence[Found]) -> Iterator[list[str]]:
    for file, case in ((measured, case) for measured in files for case in measured.results["cases"]):
        for before, after in _pairs(case):
            blocks = [start["num_gpu_blocks"] for start in (before, after)]
            yield [
                *_case(file, case, before["runner"]),
                f"{blocks[0]} → {blocks[1]} ({blocks[1] / blocks[0] - 1:+.1%})",
                f"{before['first']:.0f} → {after['first']:.0f}",
                f"{before['seconds']:.1f} → {after['seconds']:.1f}",
            ]


def _pairs(case: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each runner's starts without and with the plugin."""
    for patched, stock in STOCK_OF.items():
        before, after = (_best(case["sides"].get(side)) for side in (stock, patched))
        if before is not None and after is not None:
            yield {**before, "runner": _START_RUNNERS[stock]}, after


def _best(side: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the shortest later start, with the first start's seconds."""
    if side is None or not side["alone"] or any(start["error"] for start in (side["first_together"], *side["alone"])):
        return None
    best: Mapping[str, Any] = min(side["alone"], key=lambda start: start["seconds"])
    return {**best, "first": side["first_together"]["seconds"]}
