# SPDX-License-Identifier: Apache-2.0
"""Every figure of the engines: benchmarks/results/engines.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.results import telling_line
from vllm_hwplugin_lab.bench.table import (
    NOT_MEASURED,
    SIDE_NAMES,
    comparisons,
    host_line,
    idle,
    profiled,
    ratio_name,
    rows,
    sides_of,
    speed,
    steps,
)

from ._read import Found
from ._text import head, paragraph, row

HEAD = """# Engines: every figure

Made from the files `engines-*.json` by `make docs`; do not edit. What follows from it is in
[docs/benchmarks.md](../../docs/benchmarks.md). Unpatched is `VLLM_HWPLUGIN=0`; sides without V2 in their name run on
Model Runner V1. A step is one pass of the target over the drafts, with the draft phase after it. Its time is from the
best round, with the median round's in brackets; tokens/s follow from such a step and the acceptance of all rounds.
Acceptance of the `tiny` shape is real (trained checkpoints, greedy); the other shapes have dummy weights and vLLM's
synthetic acceptance, and are compared by the time of a step. The launch figures come from torch's profiler over steps
that verify every request: medians per step, GPU busy as the mean. A `-` was not measured.
"""

_IN_TURN = (
    "All engines were alive at the same time, each core in its own process, and were measured in turn; a step counts "
    "while every request of the batch is drafting."
)


def _acceptance(side: Mapping[str, Any] | None) -> str:
    if side is None or not side["acceptance_per_position"]:
        return NOT_MEASURED
    return f"{side['acceptance_length']:.3f} ({' '.join(f'{a:.3f}' for a in side['acceptance_per_position'])})"


def _launches(side: Mapping[str, Any] | None) -> list[str]:
    graphs, kernels = (
        f"{profiled(side, whole)} ({profiled(side, draft)})"
        for whole, draft in (("graph_launches", "draft_graph_launches"), ("kernel_launches", "draft_kernel_launches"))
    )
    return [profiled(side, "gpu_busy_ms"), idle(side), graphs, kernels]


def _ratio(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def markdown(files: Sequence[Found]) -> str:
    """Return the page, with a chapter for each file."""
    return "\n".join([HEAD, *(_section(file.name, file.results) for file in files)])


def _section(name: str, results: Mapping[str, Any]) -> str:
    host, settings, sides = results["host"], results["settings"], sides_of(results)
    graphs = "eager" if host["device"] == "cpu" else f"cudagraph_mode {settings['cudagraph_mode']}"
    facts = [
        host["name"] + (f", driver {host['driver']}" if host["driver"] else ""),
        f"torch {host['torch']}",
        f"Python {host['python']}",
        graphs,
        f"{settings['rounds']} rounds",
        f"vllm-hwplugin {results['plugin']}" + (f" at {results['commit']}" if results["commit"] else ""),
        results["date"],
    ]
    for variables in ("vllm_environment", "patched_environment"):
        if settings[variables]:
            whose = "all sides" if variables == "vllm_environment" else "patched"
            facts.append(f"{whose} with " + " ".join(f"`{k}={v}`" for k, v in settings[variables].items()))
    lines = [
        f"## vLLM {host['vllm']}, {host['name']}: `{name}`",
        "",
        "; ".join(facts) + ".",
        "",
        paragraph(f"{_IN_TURN} {host_line(results)}"),
        "",
    ]
    lines += ["### Speed and acceptance", ""]
    names = [SIDE_NAMES[side] for side in sides]
    pairs = comparisons(sides)
    speeds_of, steps_of = [f"{name} tok/s" for name in names], [f"step ms {name}" for name in names]
    lines += head(["case", "batch", *speeds_of, *(ratio_name(*pair) for pair in pairs), *steps_of])
    cases = list(rows(results))
    for case in cases:
        speeds, taken = ([show(case.sides[side]) for side in sides] for show in (speed, steps))
        lines.append(row([case.label, case.batch, *speeds, *(_ratio(case.ratio(*pair), 3) for pair in pairs), *taken]))
    lines += ["", *head(["case", "batch", f"acceptance length (per position) {names[0]}", *names[1:]])]
    lines += [row([case.label, case.batch, *(_acceptance(case.sides[side]) for side in sides)]) for case in cases]
    with_profile = [case for case in cases if any(side and "profile" in side for side in case.sides.values())]
    if with_profile:
        lines += ["", "### Launches a step, by profiler (in brackets: of the draft phase)", ""]
        lines += head(
            ["case", "batch", "side", "GPU busy ms", "GPU idle", "graph launches", "kernel launches from the host"]
        )
        for case in with_profile:
            lines += [row([case.label, case.batch, SIDE_NAMES[side], *_launches(case.sides[side])]) for side in sides]
    lines += ["", *_features(results), *_failures(results)]
    return "\n".join(lines)


def _features(results: Mapping[str, Any]) -> list[str]:
    patched = [entry for case in results["cases"] for side, entry in case["sides"].items() if side.endswith("patched")]
    live = sorted({feature for entry in patched for feature in entry["processes"].get("live", ())})
    lines = [f"Patched in: {', '.join(live) or 'nothing'}.", ""]
    platforms = sorted({entry["platform"] for entry in patched if entry.get("platform")})
    if platforms:
        lines += [f"Platform class of the patched engines: {', '.join(f'`{name}`' for name in platforms)}.", ""]
    return lines


def _failures(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for case in results["cases"]:
        label = f"{case['shape']} {case['method']} k={case['k']}"
        if case.get("stopped") is not None:
            lines += [f"**{label}: {case['stopped']} ended it before everything was measured.**", ""]
        for name, side in case["sides"].items():
            if side["error"]:
                last = telling_line(side["log_tail"])
                lines += [f"**{label}, {SIDE_NAMES[name]}: failed** ({side['error']}): `{last}`", ""]
    return lines
