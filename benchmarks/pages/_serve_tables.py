# SPDX-License-Identifier: Apache-2.0
"""What clients see: benchmarks/results/serve.md, made of the files of ``bench serve``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench import NOT_MEASURED, SHAPES, SIDE_NAMES, STOCK_OF, TINY
from vllm_hwplugin_lab.bench.serve import LATENCIES

from ._read import Found
from ._text import item, paragraph, table

_HEAD = """# As clients see it

Made from the files `serve-*.json` by `make docs`; do not edit.
"""
_HOW = (
    "The engine is vLLM's asynchronous one, its core in a process of its own; the engines of a file's sides were alive "
    "together on one GPU and had their rounds in turn. tok/s is the best round's, the slowest one's in brackets, and "
    "`by stock` compares the best with stock vLLM's on the same model runner (MRV2 is Model Runner V2): within what a "
    "side's own rounds differ by, it says nothing. Latencies are P50 / P99 of all requests of all "
    f"rounds, in milliseconds: {', '.join(f'{name[:-3].upper()} is the {what}' for name, what in LATENCIES.items())}. "
    "Acceptance is tokens a step, the target's own included."
)


def markdown(files: Sequence[Found]) -> str:
    """The page: one chapter for each file, and in it a table for each temperature."""
    lines = [_HEAD, paragraph(_HOW), ""]
    for file in files:
        lines += [f"## `{file.name}`", "", *_chapter(file)]
    return "\n".join(lines)


def _chapter(file: Found) -> Iterator[str]:
    settings = file.results["settings"]
    yield paragraph(f"{file.source}. {_asked(settings)}")
    yield ""
    if missing := list(_missing(file.results)):
        yield from missing
        yield ""
    yield from _spread(file.results)
    for temperature in settings["temperatures"]:
        yield f"### Temperature {temperature:g}"
        yield ""
        names = [f"{name.removesuffix('_ms').upper()} ms" for name in LATENCIES]
        columns = ["k", "at once", "a second", "side", "tok/s", "by stock", *names, "acceptance"]
        yield from table(columns, _rows(file.results, temperature))
        yield ""
        if steps := list(_steps(file.results, temperature)):
            yield from table(["k", "at once", "a second", "side", "fast path", "steps", "served", "others"], steps)
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
    prompts = settings["prompts"] or (
        "prompts of its own" if shape == TINY else f"random prompts of {settings['input_len']} tokens"
    )
    with_extra = " ".join(f"`{name}={value}`" for name, value in settings["patched_environment"].items())
    return (
        f"{settings['method']}, {models}; {prompts}, answers of at most {settings['output_len']} tokens, "
        f"{settings['rounds']} rounds{f'; patched with {with_extra}' if with_extra else ''}."
    )


def _spread(results: Mapping[str, Any]) -> Iterator[str]:
    """How long the rounds took, and how much those of one side and load differ."""
    loads = [
        load
        for case in results["cases"]
        for entry in case["sides"].values()
        for load in entry["loads"].values()
        if load is not None
    ]
    if loads:
        seconds = [one for load in loads for one in load["seconds"]]
        apart = [max(load["tokens_per_second"]["all"]) / min(load["tokens_per_second"]["all"]) for load in loads]
        yield paragraph(
            f"A round took {min(seconds):.2f} to {max(seconds):.2f} s. The fastest of a side's rounds of one load had "
            f"{statistics.median(apart):.2f} times the tokens/s of its slowest (median), and at most {max(apart):.2f}."
        )
        yield ""


def _rows(results: Mapping[str, Any], temperature: float) -> Iterator[list[str]]:
    for key, found in _loads(results, temperature):
        for side in SIDE_NAMES:
            if side in found:
                yield [*key, SIDE_NAMES[side], *_figures(found[side], found.get(STOCK_OF.get(side, "")))]


def _steps(results: Mapping[str, Any], temperature: float) -> Iterator[list[str]]:
    """How many steps each fast path of the plugin served, and why vLLM's own way was taken in the others."""
    for key, found in _loads(results, temperature):
        for side in SIDE_NAMES:
            for path, outcomes in ((found.get(side) or {}).get("paths") or {}).items():
                steps = sum(outcomes.values())
                shares = {outcome: f"{count / steps:.0%}" for outcome, count in outcomes.items() if count}
                served = shares.pop("served", "0%")
                others = ", ".join(f"{outcome} {share}" for outcome, share in shares.items())
                yield [*key, SIDE_NAMES[side], path, str(steps), served, others]


def _loads(results: Mapping[str, Any], temperature: float) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """Each load that some side has measured: what it is, as the first cells of a row, and it by side."""
    for case in results["cases"]:
        first, *_ = case["sides"].values()
        for name in first["loads"]:
            found = {side: entry["loads"][name] for side, entry in case["sides"].items()}
            known = next((one for one in found.values() if one is not None), None)
            if known is not None and known["temperature"] == temperature:
                rate = f"{known['request_rate']:g}" if known["request_rate"] else NOT_MEASURED
                yield [str(case["k"]), str(known["concurrency"] or "all"), rate], found


def _figures(load: Mapping[str, Any] | None, stock: Mapping[str, Any] | None) -> list[str]:
    if load is None:
        return [NOT_MEASURED] * (3 + len(LATENCIES))
    speed, slowest = load["tokens_per_second"]["best"], min(load["tokens_per_second"]["all"])
    ratio = NOT_MEASURED
    if stock is not None and stock["rounds"] == load["rounds"]:  # the best of more is better by chance alone
        ratio = f"{speed / stock['tokens_per_second']['best']:.2f}"
    length = load["acceptance_length"]
    latencies = [_percentiles(load[name]) for name in LATENCIES]
    return [f"{speed:.0f} ({slowest:.0f})", ratio, *latencies, NOT_MEASURED if length is None else f"{length:.3f}"]


def _percentiles(spread: Mapping[str, float] | None) -> str:
    return NOT_MEASURED if spread is None else f"{spread['p50']:.2f} / {spread['p99']:.2f}"
