# SPDX-License-Identifier: Apache-2.0
"""What clients see: benchmarks/results/serve.md, made of the files of ``bench serve``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import Version

from vllm_hwplugin_lab.bench import SHAPES
from vllm_hwplugin_lab.bench.plan import STOCK_OF, TINY
from vllm_hwplugin_lab.bench.serve import LATENCIES, frontend, groups, tables
from vllm_hwplugin_lab.bench.table import NOT_MEASURED, SIDE_NAMES, between

from ._gains import DRAFTER_NAMES
from ._read import Found
from ._text import missing, paragraph, table

_HEAD = """# As clients see it

Made from the files `serve-*.json` by `make docs`; do not edit.
"""
_HOW = (
    "The engines of a file's sides shared the same GPUs and had their rounds in turn. Speedup compares the best "
    "round's tokens/s with the best round of unpatched vLLM on the same model runner (V2 is Model Runner "
    "V2, the rest V1); a speedup within the spread of one side's rounds is noise. A round shorter than 5 seconds is "
    "mostly its start and its end. `GPU busy` is the share of the rounds' time in which the GPU ran a kernel, by its "
    "driver; on several GPUs a kernel that waits for another rank counts as busy. Latencies cover all rounds: "
    f"{', '.join(f'{name[:-3].upper()} is the {meaning}' for name, meaning in LATENCIES.items())}. "
    "Acceptance length is tokens a step, the target's own included."
)
_BY_ENGINE = (
    "Not over HTTP: vLLM's asynchronous engine, with its core in its own process, was called directly, and all "
    "requests of a round count."
)
_FULL = "*"
_ONE_ROUND = "†"
#: Utilization of a core over a whole round that fills it in the round's middle.
_FULL_CORE = 0.9
_WAITS = (
    f" {_FULL}: the API server process was CPU-bound, so requests queued there ([what to "
    "set](docs/benchmarks.md#when-the-api-server-is-the-limit))."
)
#: Concurrencies and targets of README.md.
_SHOWN = (1, 16, 64, 128, 256)
_MOST_TARGETS = 16
_COUNTED = {1: "one", 2: "two", 4: "four", 8: "eight"}


def over_http(files: Sequence[Found]) -> list[Found]:
    """Return the files of servers with a GPU that vLLM's client called."""
    return [file for file in _by_client(files) if _servers(file) and file.results["host"]["device"] != "cpu"]


def _by_client(files: Sequence[Found]) -> list[Found]:
    return [file for file in files if "client" in file.results["settings"]]


def _servers(file: Found) -> int:
    return int(file.results["settings"].get("api_server_count", 1))


def live(files: Sequence[Found]) -> str:
    """Return the table of what clients of a server see.

    For README.md and docs/benchmarks.md, a row for each case and model runner, without features that are off by
    default; a load that was measured in one round says so.
    """
    files = [file for file in over_http(files) if not file.results["settings"]["patched_environment"]]
    files.sort(key=lambda file: Version(file.vllm), reverse=True)
    rows = [row for file in files for case in file.results["cases"] for row in _live_rows(file, case)]
    if not rows:
        return "What clients of a server see was not measured."
    names = [
        "vLLM",
        "model runner",
        "target and drafts",
        "concurrency",
        "tokens/s",
        *(f"{name} {percentile}" for name in ("TTFT", "TPOT") for percentile in ("P50", "P99")),
        "GPU busy, baseline",
        "measured",
    ]
    devices = " or ".join(sorted({file.device for file in files}))
    numbers = " or ".join(_COUNTED[gpus] for gpus in sorted({_gpus(file.results["settings"]) for file in files}))
    loads = "; ".join(dict.fromkeys(_prompts(file.results["settings"]) for file in files))
    full, once = (any(mark in cell for row in rows for cell in row) for mark in (_FULL, _ONE_ROUND))
    text = (
        f"Ratios, plugin / unpatched vLLM. Throughput: higher is better. TTFT, TPOT: lower is better. On {numbers} "
        f"{devices}; {loads}.{_WAITS if full else ''}"
        f"{f' {_ONE_ROUND}: one round.' if once else ''} Loaded machine: other engines started or ran on another GPU, "
        "which may slow unpatched vLLM more. Empty Triton cache: a step without a graph compiles kernels for each new "
        "multiple of 32 tokens ([what that costs](troubleshooting.md#no-gain-or-slower-why)), so part of the ratio "
        "goes once the cache is full. Every figure and its conditions: [serve.md](benchmarks/results/serve.md)."
    )
    return "\n".join([*table(names, rows), "", paragraph(text)])


def first_screen(files: Sequence[Found]) -> tuple[str, str]:
    """Return README.md's sentence with one figure, and its table.

    The table has the newest vLLM on a machine with no other load: a row for each target, at most `_MOST_TARGETS`.
    """
    quiet = [
        file for file in over_http(files) if not file.conditions and not file.results["settings"]["patched_environment"]
    ]
    newest = max((Version(file.vllm) for file in quiet), default=None)
    rows: dict[tuple[str, str], dict[int, _Load]] = {}
    quiet = sorted((file for file in quiet if Version(file.vllm) == newest), key=lambda file: str(file.results["date"]))
    for file in quiet:
        for case in file.results["cases"]:
            for patched, stock in STOCK_OF.items():
                for before, after in _pairs(case, stock, patched):
                    if (at := before["concurrency"]) in _SHOWN:
                        name = f"{_target(file.results['settings'])}{file.asked}, {_drafter(file, case)}"
                        name += "" if _servers(file) == 1 else f", {frontend(file.results['settings'])}"
                        # The newest file's load is of the newest commit.
                        rows.setdefault((name, "V2" if stock == "mrv2" else "V1"), {})[at] = _Load(file, before, after)
    if not rows:
        return ("What clients of a server see was not measured.",) * 2
    # Of more targets, those that were measured at most concurrencies; by name, so that a target's rows are together.
    shown = dict(sorted(sorted(rows.items(), key=lambda row: -len(row[1]))[:_MOST_TARGETS], key=lambda row: row[0]))
    lines = [
        [
            f"{name} ({runner})",
            *(loads[at].cell if at in loads else NOT_MEASURED for at in _SHOWN),
            _busy([load.before.get("gpu_busy") for load in loads.values()]),
        ]
        for (name, runner), loads in shown.items()
    ]
    entries = [(*row, at, load) for row, loads in shown.items() for at, load in loads.items()]
    # A figure to lead with is of V2, vLLM's default, and of rounds in which requests did not queue in the API server.
    several = [entry for entry in entries if entry[3].before["rounds"] > 1 and not entry[3].is_full]
    sure = [entry for entry in several if entry[1] == "V2"] or several or entries
    name, _, requests, best = max(sure, key=lambda entry: entry[3].speedup)
    gpus = _COUNTED[_gpus(best.file.results["settings"])]
    headline = (
        f"**{best.speedup:.2f}×** the tokens/s of unpatched vLLM {best.file.vllm}: {name}, {requests} concurrent "
        f"requests, {gpus} {best.file.device}, TTFT {best.ratio('ttft_ms'):.2f}×, TPOT {best.ratio('tpot_ms'):.2f}×."
    )
    devices = " or ".join(sorted({load.file.device for *_, load in entries}))
    prompts = "; ".join(dict.fromkeys(_prompts(load.file.results["settings"]) for *_, load in entries))
    text = (
        f"Tokens/s (TTFT P50 / P99), plugin / unpatched vLLM {newest}: more tokens/s and less TTFT are better. "
        f"{devices}, no other load on the machine; dummy weights, equal acceptance; {prompts}."
    )
    if any(load.is_full for *_, load in entries):
        text += _WAITS
    if any(load.before["rounds"] == 1 for *_, load in entries):
        text += f" {_ONE_ROUND}: one round."
    names = ["concurrent requests", *map(str, _SHOWN), "GPU busy, unpatched"]
    return paragraph(headline), "\n".join([*table(names, lines), "", paragraph(text)])


class _Load(NamedTuple):
    """A load with and without the plugin."""

    file: Found
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def speedup(self) -> float:
        return float(self.after["tokens_per_second"]["best"] / self.before["tokens_per_second"]["best"])

    @property
    def is_full(self) -> bool:
        """Whether the server's only process filled a core, so that requests queued there."""
        return bool(self.after.get("cpu", {}).get("server", 0) >= _FULL_CORE)

    @property
    def cell(self) -> str:
        marks = f"{self.waits('ttft_ms', 'p50')}{_ONE_ROUND if self.before['rounds'] == 1 else ''}"
        ttft = " / ".join(f"{self.ratio('ttft_ms', percentile):.2f}" for percentile in ("p50", "p99"))
        return f"{self.speedup:.2f}× ({ttft}){marks}"

    def ratio(self, latency: str, percentile: str = "p50") -> float:
        return float(self.after[latency][percentile] / self.before[latency][percentile])

    def waits(self, latency: str, percentile: str) -> str:
        """Return the mark of a latency that grew in the server's queue."""
        return _FULL if self.ratio(latency, percentile) > 1 and self.is_full else ""


def _drafter(file: Found, case: Mapping[str, Any]) -> str:
    method = file.results["settings"]["method"]
    return f"{DRAFTER_NAMES.get(method, method)} k={case['k']}" if case["k"] else "no drafts"


def _busy(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return between(known, ".0%", "–") if known else NOT_MEASURED


def _live_rows(file: Found, case: Mapping[str, Any]) -> Iterator[list[str]]:
    settings = file.results["settings"]
    for patched, stock in STOCK_OF.items():
        loads = [_Load(file, before, after) for before, after in _pairs(case, stock, patched)]
        loads.sort(key=lambda load: (load.before["concurrency"] or math.inf, load.before["request_rate"]))
        if loads:
            asked = [
                (f"{load['request_rate']:g}/s" if load["request_rate"] else str(load["concurrency"]))
                + (_ONE_ROUND if load["rounds"] == 1 else "")
                for _, load, _ in loads
            ]
            shares = [load.before.get("gpu_busy") for load in loads]
            yield [
                file.vllm,
                "V2" if stock == "mrv2" else "V1",
                f"{_target(settings)}{file.asked}, {settings['method']} k={case['k']}"
                f"{'' if _servers(file) == 1 else f', {frontend(settings)}'}{file.conditions}{_extra(settings)}",
                " / ".join(asked),
                " / ".join(f"{load.speedup:.2f}" for load in loads),
                *(
                    " / ".join(
                        f"{load.ratio('ttft_ms', percentile):.2f}{load.waits('ttft_ms', percentile)}" for load in loads
                    )
                    for percentile in ("p50", "p99")
                ),
                *(
                    " / ".join(f"{load.ratio('tpot_ms', percentile):.2f}" for load in loads)
                    for percentile in ("p50", "p99")
                ),
                " / ".join(NOT_MEASURED if share is None else f"{share:.0%}" for share in shares),
                file.day,
            ]


def features(files: Sequence[Found], variable: str) -> str:
    """Return a table of loads with and without a feature.

    Args:
        files: of ``bench serve``.
        variable: the feature's environment variable, which the patched side of its files has. The other side is the
            plugin without it, or unpatched vLLM.
    """
    names = ["target and drafts", "with", "concurrency", "tokens/s", *(f"{name} P50" for name in ("ITL", "TTFT"))]
    names += ["TTFT P99", "rounds", "measured"]
    lines = []
    files = [file for file in _with(variable, files) if file.results["settings"]["shape"] is not None]
    without = {_without(case) for file in files for case in file.results["cases"]}
    for file in files:
        settings = file.results["settings"]
        value = settings["patched_environment"][variable]
        more = " ".join(
            [*(f"{name}={value}" for name, value in settings["vllm_environment"].items()), *settings["client"]]
        )
        for case in file.results["cases"]:
            target = f"{_target(settings)}, {_drafter(file, case)}{f', `{more}`' if more else ''}"
            if length := settings["acceptance_length"]:
                target += f", {length} tokens per step"
            loads = [_Load(file, *both) for both in _pairs(case, _without(case), "mrv2-patched")]
            for load in sorted(loads, key=lambda load: load.before["concurrency"] or math.inf):
                ratios = (load.speedup, load.ratio("itl_ms"), load.ratio("ttft_ms"), load.ratio("ttft_ms", "p99"))
                at, rounds = str(load.before["concurrency"] or "any"), str(load.before["rounds"])
                lines.append([target, f"`{value}`", at, *(f"{ratio:.2f}" for ratio in ratios), rounds, file.day])
    other = "both with the plugin" if without == {"mrv2-plugin"} else "without: unpatched vLLM"
    how = f"Ratios, with / without the feature, {other}: more tokens/s and less time are better. "
    sources = "; ".join(dict.fromkeys(f"`{file.name}` ({file.source})" for file in files))
    return "\n".join([*table(names, lines), "", paragraph(f"{how}Dummy weights, equal acceptance. {sources}.")])


def accepted(files: Sequence[Found], variable: str) -> str:
    """Return a table of the drafts that trained weights accept.

    Args:
        variable: as for :func:`features`.
    """
    names = ["vLLM", "target and drafts", "with", "temperature", "steps", "tokens per step, without", "with", "ratio"]
    files, lines = [file for file in _with(variable, files) if file.results["settings"]["shape"] is None], []
    for file in files:
        settings = file.results["settings"]
        for case in file.results["cases"]:
            for before, after in _pairs(case, _without(case), "mrv2-patched"):
                left, right = (load["acceptance_length"] for load in (before, after))
                row = [file.vllm, f"{_target(settings)}, {_drafter(file, case)}"]
                row.append(f"`{settings['patched_environment'][variable]}`")
                row += [f"{before['temperature']:g}", str(after["drafts"])]
                lines.append([*row, f"{left:.3f}", f"{right:.3f}", f"{right / left:.3f}"])
    sources = "; ".join(f"`{file.name}` ({file.source})" for file in files)
    return "\n".join([*table(names, lines), "", paragraph(f"{sources}.")])


def _with(variable: str, files: Sequence[Found]) -> list[Found]:
    return [file for file in over_http(files) if variable in file.results["settings"]["patched_environment"]]


def _without(case: Mapping[str, Any]) -> str:
    """Return a case's side without the feature: the plugin's, or unpatched vLLM."""
    return "mrv2-plugin" if "mrv2-plugin" in case["sides"] else STOCK_OF["mrv2-patched"]


def api_servers(files: Sequence[Found]) -> str:
    """Return the table of loads that several numbers of API servers got."""
    same: dict[tuple[str, ...], list[Found]] = {}
    plain = [file for file in _by_client(files) if not file.results["settings"]["patched_environment"]]
    for file in sorted(plain, key=lambda file: str(file.results["date"])):
        settings = file.results["settings"]
        key = (file.vllm, _target(settings) + file.asked, settings["method"], _prompts(settings), file.device)
        same.setdefault(key, []).append(file)
    names = ["vLLM", "target and drafts", "concurrency", "side", "requests to", "tokens/s"]
    names += [f"{name} {percentile}, ms" for name in ("TTFT", "TPOT") for percentile in ("P50", "P99")]
    lines = [line for alike in same.values() for line in _frontend_lines(alike)]
    return "\n".join(table([*names, "server CPU", "measured"], lines)) if lines else "Not measured yet."


def without_model(files: Sequence[Found]) -> str:
    """Return the table of API servers before an executor that computes nothing."""
    shown = [("TTFT", "p50"), ("TTFT", "p99"), ("TPOT", "p50"), ("ITL", "p99")]
    names = ["vLLM", "stream_interval", "clients", "tokens/s", "ratio"]
    names += [f"{name} {percentile.upper()}, ms" for name, percentile in shown]
    on_cpu = [file for file in _by_client(files) if file.results["host"]["device"] == "cpu"]
    loads = [
        _Load(file, *pair)
        for file in on_cpu
        for case in file.results["cases"]
        for pair in _pairs(case, "stock", "patched")
    ]
    lines = [
        [
            load.file.vllm,
            str(load.file.results["settings"]["vllm_arguments"].get("stream_interval", 1)),
            str(load.before["concurrency"]),
            " → ".join(f"{side['tokens_per_second']['best']:.0f}" for side in (load.before, load.after)),
            f"{load.speedup:.2f}",
            *(
                " → ".join(f"{side[f'{name.lower()}_ms'][percentile]:.0f}" for side in (load.before, load.after))
                for name, percentile in shown
            ),
            load.file.day,
        ]
        for load in loads
    ]
    return "\n".join(table([*names, "measured"], lines)) if lines else "Not measured yet."


def _frontend_lines(files: Sequence[Found]) -> Iterator[list[str]]:
    """Yield a line per load that several API server counts got."""
    measured: dict[tuple[str, str, str], dict[int, tuple[Found, Mapping[str, Any]]]] = {}
    for file in sorted(files, key=lambda file: _servers(file) or math.inf):  # without HTTP last
        for name, loads in groups(file.results):
            for at, side, load in loads:
                measured.setdefault((name, at, side), {})[_servers(file)] = (file, load)
    for (name, at, side), by_count in measured.items():
        for file, load in by_count.values() if len(by_count) > 1 else ():
            settings, cpu = file.results["settings"], load.get("cpu", {}).get("server")
            yield [
                file.vllm,
                f"{_target(settings)}{file.asked}, {name}",
                at,
                SIDE_NAMES[side],
                frontend(settings),
                f"{load['tokens_per_second']['best']:.0f}",
                *(
                    f"{load[latency][percentile]:.1f}" if load[latency] else NOT_MEASURED
                    for latency in ("ttft_ms", "tpot_ms")
                    for percentile in ("p50", "p99")
                ),
                NOT_MEASURED if cpu is None else f"{cpu:.0%}",
                file.day,
            ]


def _pairs(case: Mapping[str, Any], stock: str, patched: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return both sides' loads, if measured for equally many rounds."""
    # The best of more rounds is better by chance.
    sides = [case["sides"].get(side, {"loads": {}})["loads"] for side in (stock, patched)]
    pairs = [(before, after) for name, before in sides[0].items() if before and (after := sides[1].get(name))]
    return [(before, after) for before, after in pairs if before["rounds"] == after["rounds"]]


def markdown(files: Sequence[Found]) -> str:
    """Return the page: chapters of files, tables of temperatures."""
    lines = [_HEAD, paragraph(_HOW), ""]
    for file in files:
        lines += [f"## `{file.name}`", "", *_chapter(file)]
    return "\n".join(lines)


def _chapter(file: Found) -> Iterator[str]:
    settings = file.results["settings"]
    yield paragraph(f"{file.source}. {_asked(settings)} {_how(settings)}")
    yield ""
    if left_out := list(missing(file.results, lambda case: f"k={case['k']}", "measured")):
        yield from left_out
        yield ""
    for name, loads in groups(file.results):
        yield f"### {name}"
        yield ""
        for told, columns, lines in tables(loads):
            yield paragraph(told)
            yield ""
            yield from table(columns, lines)
            yield ""


def _target(settings: Mapping[str, Any]) -> str:
    shape = settings["shape"]
    if shape is None:
        return str(settings["target"])
    if shape == TINY:
        return "tiny"
    # The title of a shape that needs them says so.
    more = _gpus(settings) > SHAPES[shape].tensor_parallel_size
    return f"{SHAPES[shape].title} on {_COUNTED[_gpus(settings)]} GPUs" if more else SHAPES[shape].title


def _gpus(settings: Mapping[str, Any]) -> int:
    """Return the GPUs of an engine."""
    needed = 1 if settings["shape"] in (None, TINY) else SHAPES[settings["shape"]].tensor_parallel_size
    return max(needed, int(settings["tensor_parallel_size"]))


def _extra(settings: Mapping[str, Any]) -> str:
    set_for = " ".join(f"`{name}={value}`" for name, value in settings["patched_environment"].items())
    return f"; patched with {set_for}" if set_for else ""


def _prompts(settings: Mapping[str, Any]) -> str:
    lengths = [settings["input_len"], settings["output_len"]]
    if ratio := settings.get("range_ratio", 0):
        lengths = [f"{length * (1 - ratio):.0f} to {length * (1 + ratio):.0f}" for length in lengths]
    prompts = settings["prompts"] or (
        "its own prompts" if settings["shape"] == TINY else f"random prompts of {lengths[0]} tokens"
    )
    return f"{prompts}, answers of at most {lengths[1]} tokens"


def _how(settings: Mapping[str, Any]) -> str:
    if "client" not in settings:
        return _BY_ENGINE
    counted = "the first third of a round's requests warms up and does not count"
    return f"By vLLM's own client, {frontend(settings)}; {counted}."


def _asked(settings: Mapping[str, Any]) -> str:
    models = f"{settings['target']} with {settings['draft'] or 'its own drafter'}"
    if (shape := settings["shape"]) is not None:
        models = "the tiny trained checkpoints" if shape == TINY else f"{_target(settings)}'s shape, dummy weights"
    return f"{settings['method']}, {models}; {_prompts(settings)}, {settings['rounds']} rounds{_extra(settings)}."
