# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md and the table of README.md: the plugin's gains, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench.plan import TINY
from vllm_hwplugin_lab.bench.table import NOISE, SIDE_NAMES, between, idle, profiled, step, worth

from ._gains import Gain, failures, gains
from ._read import Found
from ._readme_tables import starts
from ._serve_tables import api_servers, features, live, without_model
from ._text import escaped, item, paragraph, table

_BOTH = ("stock", "patched")
#: Model runner -> its sides, the baseline first.
_RUNNERS = {"V1": _BOTH, "V2": ("mrv2", "mrv2-patched")}

_HEAD = """# Benchmarks of engines

How much faster an engine is with the plugin. Every figure: [engines](../benchmarks/results/engines.md), [clients of a
server](../benchmarks/results/serve.md), [single kernels](kernel-benchmarks.md).
"""

_SIDES = (
    "Unpatched is vLLM with `VLLM_HWPLUGIN=0`; patched is the same vLLM with the plugin's defaults. Both run on both "
    "model runners. Each engine core has its own process, as in a server. All engines share one GPU and are measured "
    "in turn, in short rounds. A step counts while every request of the batch is drafting. The targets have the sizes "
    "of Qwen3's models and dummy weights. vLLM's synthetic acceptance decides which drafts are accepted, so tokens/s "
    "differ only by the time of a step."
)
_TRAINED = " `tiny` has trained checkpoints, so its acceptance is real."

_API_SERVER = (
    "If `server CPU` of `bench serve` is near 100%, the API server process is the limit, not the engine: requests "
    "queue there, and TTFT rises with the concurrency. Give vLLM `--api-server-count N`, and raise N "
    "until `server CPU` falls; each process needs a core."
)
_MERGED = (
    "vLLM handles 128 outputs of a step, lets their responses be written, and handles the next 128. With up to 128 "
    "requests a server that is behind so writes one response with a request's tokens of several steps; with more "
    "requests it writes a response for each step. The plugin sets vLLM's VLLM_V1_OUTPUT_PROC_CHUNK_SIZE to 65536, "
    "unless you set it (128 is vLLM's default). Unpatched vLLM → with the plugin: one API server, its engine and the "
    "client on two CPU cores, and an executor without a model, whose steps take 6 ms "
    "(`vllm_hwplugin_lab.bench.no_model`). Answers have at most 256 tokens. `--stream-interval 4` sends four tokens of "
    "a request in each response, so one server keeps up with more requests, with and without the plugin."
)
_CHUNK = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
_ON_GPU = (
    "On a GPU, one API server with vLLM's 128 in place of 65536, then loads that one and three servers got, on "
    "different machines, whose CPUs differ: compare the two sides."
)
_WHY = (
    "vLLM launches a drafter without graphs kernel by kernel; meanwhile the GPU waits. The plugin's graphs replace "
    "most launches. If the GPU is busy nearly all of a step, there is nothing to gain, and less than its idle share if "
    "its power is at the limit ([figures](troubleshooting.md#does-my-server-gain)). The table has the smallest batch, "
    "unpatched → patched. GPU busy and launches come from torch's profiler, in a separate run; the idle share is of a "
    "step without the profiler:"
)

_AGAIN = """## Measure it on your host

```
vllm-hwplugin bench --shape 0.6b --shape 8b --method eagle3 --k 3 --json engines.json
vllm-hwplugin bench --shape 0.6b --shape 8b --method dflash --k 7 --json engines.json
vllm-hwplugin bench --shape tiny --method eagle3 --k 3 --model FOLDER --json engines.json
```

No network and no model is needed: the shapes have dummy weights, and FOLDER is `tests/assets/small` of the source tree.
The run ends with a table and a verdict. `--profile FOLDER` shows instead where the host's
time of a step goes, function by function, and leaves traces for Perfetto. `--time-limit SECONDS`, or Ctrl-C, ends a run
with what all sides have measured. `--side plugin --side patched --patched-env VARIABLE=VALUE` measures one variable
against the plugin without it. With `--method none` nothing drafts: `--side mrv2 --side mrv2-patched` says what
[graphs without a drafter](model-runner-v2.md#without-a-drafter) gain.

Your own target, drafter and prompts, as clients see them (TTFT, TPOT, ITL, end to end, acceptance by position), and
the kinds of steps that the time goes to; arguments after `--` go to vLLM's own client, `vllm bench serve`. `--html
FILE` writes a page with drawings that opens from disk. `--url` measures a server that runs already, without kinds of
steps, and its results hold what was sent and what the server says of itself. `--against FILE` compares with such a run:
the table of both, the spread of their rounds, a verdict, and exit code 1 where a load is slower. Start the server with
`VLLM_HWPLUGIN=0` for the first run, and both times with `--no-enable-prefix-caching`. `--api-server-count N` starts the
servers with N API server processes. `--no-http` has the same client send the same requests into vLLM's `AsyncLLM`, in
its own process; the difference is what HTTP costs.

```
vllm-hwplugin bench serve --target MODEL --draft DRAFTER --method eagle3 --prompts mt_bench.jsonl --concurrency 16
vllm-hwplugin bench serve --target MODEL --draft DRAFTER --method dflash --k 7 --input-len 4096 --output-len 1024
vllm-hwplugin bench serve --shape 0.6b --method dflash --k 7 --range-ratio 0.5 --request-rate 40
vllm-hwplugin bench serve --shape 0.6b --method eagle3 --concurrency 256 --api-server-count 4
vllm-hwplugin bench serve --url http://127.0.0.1:8000 --concurrency 1 --concurrency 16 --json before.json
vllm-hwplugin bench serve --url http://127.0.0.1:8000 --against before.json --html report.html
```

This page is made from the results files of `vllm-hwplugin bench` by `make docs`.
"""


def page(files: Sequence[Found], soaks: Sequence[Found], started: Sequence[Found], served: Sequence[Found]) -> str:
    """Return docs/benchmarks.md.

    Args:
        files: of ``bench``.
        soaks: of ``bench soak``.
        started: of benchmarks/engine_starts.py.
        served: of ``bench serve``.
    """
    cases = gains(files)
    sides = paragraph(_SIDES + (_TRAINED if any(case.shape == TINY for case in cases) else ""))
    names = ["vLLM", "model runner", "target", "drafter", "speedup with the plugin", "measured"]
    parts = [
        [_HEAD, "## What do clients see?", "", _linked(live(served)), ""],
        ["## When the API server is the limit", "", paragraph(_API_SERVER), ""],
        [paragraph(_MERGED), "", without_model(served), ""],
        [_ON_GPU, "", features(served, _CHUNK), "", api_servers(served), ""],
        ["## Batches of one size", "", sides, "", *table(names, _gain_rows(cases)), "", _measured(cases), ""],
        [*_by_batch(cases), "", "![milliseconds a step, by batch size and side](benchmarks.svg)", ""],
        ["## Why, and why not", "", *_reasons(cases), ""],
        ["## Does it change what is accepted?", "", *_acceptance(cases), "", *_soaks(soaks), ""],
        ["## What does a start cost?", "", starts(started), ""],
        ["## How sure is that?", "", *_spread(cases), *_failed(files), ""],
        [_AGAIN],
    ]
    return "\n".join(line for part in parts for line in part)


def _linked(text: str) -> str:
    """Return a text of README.md with the links of docs/benchmarks.md."""
    return text.replace("(docs/benchmarks.md#", "(#").replace("(benchmarks/", "(../benchmarks/")


def _gain_rows(cases: Sequence[Gain]) -> Iterator[list[str]]:
    for runner, (stock, patched) in _RUNNERS.items():
        for case in cases:
            speedups = []
            if own := case.ratios(patched, stock):
                speedups.append(worth(own.values()).replace("slower", "**slower**"))
            if runner == "V2" and (over := case.ratios(stock, "patched")):
                speedups += [] if own else ["not measured"]
                speedups.append(f"unpatched V2 by V1 with the plugin: {between(over.values(), '.2f', '–')}×")
            if speedups:
                yield [case.vllm, runner, case.target, case.drafter, "; ".join(speedups), case.file.day]
    yield ["any other", "either", "any", "any", "not measured", ""]


def _measured(cases: Sequence[Gain]) -> str:
    """Return the conditions of the figures, from the files."""
    devices = sorted({case.file.device for case in cases})
    modes = sorted({case.file.results["settings"]["cudagraph_mode"] for case in cases})
    batches = sorted({int(row.batch) for case in cases for row in case.rows})
    days = sorted({str(case.file.results["date"])[:10] for case in cases})
    versions = sorted({str(case.file.results["plugin"]) for case in cases})
    text = (
        f"One {' or '.join(devices)}, batches of {', '.join(map(str, batches[:-1]))} and {batches[-1]} requests, all "
        f"sides with `cudagraph_mode` {' or '.join(modes)}; vllm-hwplugin {', '.join(versions)}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
    text += " V2 is Model Runner V2."
    if modes == ["FULL"]:
        text += (
            " vLLM's own default, FULL_AND_PIECEWISE, gives an unpatched drafter piecewise graphs: the plugin gains "
            "less then, which was not measured."
        )
    times = [us for case in cases for row in case.rows for side in row.sides.values() if side for us in side["host_us"]]
    text += (
        " If the GPU waits for the host, the host sets the time of a step: on a faster host unpatched vLLM is faster, "
        "and the plugin gains less. To compare hosts, `vllm-hwplugin bench` times a fixed piece of Python: "
        f"{min(times):.0f} to {max(times):.0f} us here (median {statistics.median(times):.0f})."
    )
    return paragraph(text)


def _by_batch(cases: Sequence[Gain]) -> list[str]:
    batches = sorted({int(row.batch) for case in cases for row in case.rows})
    rows = []
    for runner, (stock, patched) in _RUNNERS.items():
        for case in cases:
            if own := case.ratios(patched, stock):
                figures = [f"{own[batch]:.2f}" if batch in own else "-" for batch in batches]
                rows.append([case.vllm, runner, case.target, case.drafter, *figures])
    names = ["vLLM", "model runner", "target", "drafter", *(f"batch {batch}" for batch in batches)]
    return ["Speedup by batch size: tokens/s, patched / unpatched, each in its best round.", "", *table(names, rows)]


def _reasons(cases: Sequence[Gain]) -> list[str]:
    rows = []
    for runner, both in _RUNNERS.items():
        for case in cases:
            sides = [side for name in both if (side := case.rows[0].sides.get(name)) is not None]
            if any("profile" in side for side in sides):
                busy, launches = (
                    " → ".join(profiled(side, name) for side in sides) for name in ("gpu_busy_ms", "kernel_launches")
                )
                shown = [" → ".join(map(step, sides)), busy, " → ".join(map(idle, sides)), launches]
                rows.append([case.vllm, runner, case.target, case.drafter, *shown])
    names = ["vLLM", "model runner", "target", "drafter", "ms a step", "of it GPU busy", "GPU idle"]
    return [paragraph(_WHY), "", *table([*names, "kernel launches from the host"], rows)]


def _acceptance(cases: Sequence[Gain]) -> list[str]:
    rows = []
    for case in cases:
        if case.shape == TINY:
            sides = {side for row in case.rows for side, entry in row.sides.items() if entry is not None}
            for runner, both in _RUNNERS.items():
                if set(both) <= sides:
                    lengths = [
                        [side["acceptance_length"] for row in case.rows if (side := row.sides[name])] for name in both
                    ]
                    shown = [between(figures, ".3f") for figures in lengths]
                    rows.append([case.vllm, runner, case.drafter, *shown])
    if not rows:
        return [paragraph("No file compares the acceptance of trained checkpoints round by round.")]
    text = "Tokens that a step yields, with trained checkpoints, least to most over the batch sizes:"
    return [text, "", *table(["vLLM", "model runner", "drafter", *_BOTH], rows)]


def _soaks(files: Sequence[Found]) -> Iterator[str]:
    for file in files:
        sides, settings = file.results["sides"], file.results["settings"]
        under = " ".join(settings["under"][:3])
        facts = [f"{settings['method']} on vLLM {file.vllm}{f' under `{under}`' if under else ''}"]
        for runner, (stock, patched) in _RUNNERS.items():
            if patched in sides and sides[patched]["error"] is None:
                facts.append(_soaked(runner, sides[patched], sides.get(stock), settings))
        faults = escaped("; ".join(file.results["failures"]))
        yield item(f"{'; '.join(facts)}: {f'**{faults}**' if faults else 'nothing wrong'}.")


def _soaked(runner: str, side: Mapping[str, Any], stock: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> str:
    text = (
        f"{runner}: {side['steps']} steps with 1 to {settings['max_num_seqs']} requests, {side['texts']['count']} "
        "texts, checked by unpatched vLLM without drafts"
    )
    if features := side.get("features"):
        text += f", with {', '.join(f'`{feature}`' for feature in features)}"
    if stock is None or stock["error"] is not None:
        return text
    pairs = zip(stock["acceptance_per_position"], side["acceptance_per_position"], strict=True)
    most = max(abs(share - other) for share, other in pairs)
    return f"{text}, acceptance of each position {f'within {most:.4f} of' if most else 'equal to'} unpatched vLLM's"


def _spread(cases: Sequence[Gain]) -> list[str]:
    spreads: dict[int, float] = {}
    for case in cases:
        for row in case.rows:
            for side in filter(None, row.sides.values()):
                speeds, batch = side["tokens_per_second"], int(row.batch)
                spreads[batch] = max(spreads.get(batch, 1.0), speeds["best"] / speeds["median"])
    batches = sorted(spreads)
    # Of a run that was stopped there are fewer than were asked for.
    rounds = sorted({side["rounds"] for case in cases for row in case.rows for side in row.sides.values() if side})
    text = (
        f"Each figure is the best of {' or '.join(map(str, rounds))} rounds in one engine, started once. The largest "
        "ratio of best to median round, over all sides and cases:"
    )
    few = f"A speedup of {NOISE:.2f}× or less counts as noise here."
    if wide := [batch for batch in batches if spreads[batch] > 1 + 2 * (NOISE - 1)]:
        where = "any batch size" if wide == batches else f"batch {', '.join(map(str, wide))}"
        few += f" A single figure says little at {where}: look at several of a row."
    names: dict[str, set[str]] = {}
    for case in cases:
        names.setdefault(case.file.source, set()).add(f"`{case.file.name}`")
    return [
        paragraph(text),
        "",
        *table([f"batch {batch}" for batch in batches], [[f"{spreads[batch]:.2f}" for batch in batches]]),
        "",
        paragraph(few),
        "",
        *(item(f"{', '.join(sorted(files))}: {source}.") for source, files in names.items()),
    ]


def _failed(files: Sequence[Found]) -> Iterator[str]:
    if failed := failures(files):
        yield from ("", "Failed, and not measured since:", "")
        yield from (f"- {file.name}: {label}, {SIDE_NAMES[side]}" for file, label, side in failed)
