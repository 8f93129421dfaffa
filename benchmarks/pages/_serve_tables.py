# SPDX-License-Identifier: Apache-2.0
"""What clients see: benchmarks/results/serve.md, made of the files of ``bench serve``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench import NOT_MEASURED, SHAPES, SIDE_NAMES, STOCK_OF, TINY
from vllm_hwplugin_lab.bench.serve import LATENCIES, TABLES, held_to

from ._read import Found
from ._text import item, paragraph, table

_HEAD = """# As clients see it

Made from the files `serve-*.json` by `make docs`; do not edit.
"""
_HOW = (
    "What is measured of a file's sides was alive together on one GPU and had its rounds in turn. tok/s is the best "
    "round's, the slowest one's in brackets, and `by stock` compares the best with stock vLLM's on the same model "
    "runner (MRV2 is Model Runner V2): within what a side's own rounds differ by, it says nothing. `round s` is how "
    "many seconds the shortest round took: below 5 it is mostly its start and its end. `GPU busy` is the share of the "
    "rounds' time in which the GPU ran a kernel, as its driver says. Latencies are those of all rounds together: "
    f"{', '.join(f'{name[:-3].upper()} is the {what}' for name, what in LATENCIES.items())}. Acceptance is tokens a "
    "step, the target's own included; behind it stand the shares of drafts that were accepted, by position."
)
_BY_CLIENT = (
    "`vllm serve`, asked by vLLM's own client, of whose requests the first third of a round warms it up and does not "
    "count."
)
_BY_ENGINE = (
    "Not over HTTP: vLLM's asynchronous engine, its core in a process of its own, was asked directly, and all requests "
    "of a round count."
)


def live(files: Sequence[Found]) -> str:
    """README.md's table: what clients of a server see, of files whose requests came over HTTP."""
    lines, said = [], []
    for file in (one for one in files if "client" in one.results["settings"]):
        settings = file.results["settings"]
        for case in file.results["cases"]:
            for patched, stock in STOCK_OF.items():
                if {stock, patched} <= case["sides"].keys():
                    sides = (case["sides"][side]["loads"].values() for side in (stock, patched))
                    both = (loads for loads in zip(*sides, strict=True) if None not in loads)
                    lines += [_live_row(file, stock, loads) for loads in both]
        said.append(paragraph(f"{file.source}. {_asked(settings)}"))
    if not lines:
        return "What clients of a server see was not measured."
    names = ["vLLM", "model runner", "drafts", "requests at once", "tokens/s", "times"]
    names += ["TTFT P50, ms", "TPOT P50, ms", "GPU busy"]
    return "\n\n".join(["\n".join(table(names, lines)), *said])


def _live_row(file: Found, stock: str, loads: Sequence[Mapping[str, Any]]) -> list[str]:
    settings, (before, after) = file.results["settings"], loads
    speeds = [one["tokens_per_second"]["best"] for one in loads]
    busy = [one.get("gpu_busy") for one in loads]
    rate = f", {before['request_rate']:g} a second" if before["request_rate"] else ""
    return [
        file.vllm,
        "V2" if stock == "mrv2" else "V1",
        str(settings["method"]),
        f"{before['concurrency'] or 'any'}{rate}",
        f"{speeds[0]:.0f} → {speeds[1]:.0f}",
        f"{speeds[1] / speeds[0]:.2f}" if before["rounds"] == after["rounds"] else NOT_MEASURED,
        *(" → ".join(f"{one[name]['p50']:.1f}" for one in loads) for name in ("ttft_ms", "tpot_ms")),
        " → ".join(NOT_MEASURED if one is None else f"{one:.0%}" for one in busy),
    ]


def markdown(files: Sequence[Found]) -> str:
    """The page: one chapter for each file, and in it a table for each temperature."""
    lines = [_HEAD, paragraph(_HOW), ""]
    for file in files:
        lines += [f"## `{file.name}`", "", *_chapter(file)]
    return "\n".join(lines)


def _chapter(file: Found) -> Iterator[str]:
    settings = file.results["settings"]
    yield paragraph(f"{file.source}. {_asked(settings)} {_BY_CLIENT if 'client' in settings else _BY_ENGINE}")
    yield ""
    if missing := list(_missing(file.results)):
        yield from missing
        yield ""
    for temperature in settings["temperatures"]:
        yield f"### Temperature {temperature:g}"
        yield ""
        for told, columns, rows in TABLES:
            if found := list(_rows(file.results, temperature, rows)):
                yield paragraph(told)
                yield ""
                yield from table(["k", "at once", "a second", "side", *columns], found)
                yield ""


def _missing(results: Mapping[str, Any]) -> Iterator[str]:
    for case in results["cases"]:
        if case["stopped"] is not None:
            yield item(f"k={case['k']}: {case['stopped']} ended it before everything was measured.")
        for side, entry in case["sides"].items():
            if entry["error"]:
                yield item(f"k={case['k']}, {SIDE_NAMES[side]}: failed ({entry['error']}).")


def _asked(settings: Mapping[str, Any]) -> str:
    shape = settings["shape"]
    models = f"{settings['target']} with {settings['draft'] or 'its own drafter'}"
    if shape is not None:
        models = "the tiny trained checkpoints" if shape == TINY else f"{SHAPES[shape].title}'s shape, dummy weights"
    lengths = [settings["input_len"], settings["output_len"]]
    if ratio := settings.get("range_ratio", 0):
        lengths = [f"{one * (1 - ratio):.0f} to {one * (1 + ratio):.0f}" for one in lengths]
    prompts = settings["prompts"] or (
        "prompts of its own" if shape == TINY else f"random prompts of {lengths[0]} tokens"
    )
    with_extra = " ".join(f"`{name}={value}`" for name, value in settings["patched_environment"].items())
    return (
        f"{settings['method']}, {models}; {prompts}, answers of at most {lengths[1]} tokens, "
        f"{settings['rounds']} rounds{f'; patched with {with_extra}' if with_extra else ''}."
    )


def _rows(results: Mapping[str, Any], temperature: float, rows: Callable[..., Any]) -> Iterator[list[str]]:
    """Of each load and side that has been measured."""
    for case in results["cases"]:
        first, *_ = case["sides"].values()
        for name in first["loads"]:
            found = {side: load for side, entry in case["sides"].items() if (load := entry["loads"][name]) is not None}
            for side, load in found.items():
                if load["temperature"] == temperature:
                    rate = f"{load['request_rate']:g}" if load["request_rate"] else NOT_MEASURED
                    key = [str(case["k"]), str(load["concurrency"] or "all"), rate, SIDE_NAMES[side]]
                    yield from ([*key, *row] for row in rows(load, held_to(found, side)))
