# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench attention`` and ``bench ops``: single kernels against their rivals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, write_text
from vllm_hwplugin.cli.parser import FAILURE
from vllm_hwplugin.ops.compile.jit import GPUS

from .. import bench
from ..bench import results_text
from ..bench.micro import (
    CRASHED,
    FAILED,
    MEASURED,
    Cell,
    attention_cases,
    left_out,
    make_results,
    op_cases,
    summary,
    supervise,
)
from ._options import JsonFile, console_for, known
from ._sides import progress

#: Seconds per cell. An operation's first cell may run the compiler.
_LIMITS = {"attention": 45.0, "ops": 240.0}

#: Seconds between writes: an interrupted run loses at most these.
_KEEP = 5.0

_SEED = Annotated[int, typer.Option(help="Seed of the inputs.")]
_SECONDS = Annotated[float, typer.Option(min=1, help="Time limit: later cells are not run.")]


def attention(
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; can be repeated.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only decode, or only prefill.")] = None,
    seconds: _SECONDS = 75,
    seed: _SEED = 0,
    json_file: JsonFile = None,
) -> None:
    """Benchmark attention at head size 512: the plugin's kernel and its rivals.

    Shows time, share of the copy bandwidth, and error.

    Exit status: 1 the plugin's kernel failed, or its error exceeds twice SDPA's; 2 one of its cells was not measured.
    """
    plan = attention_cases.plan()
    kernels = known(kernel or [], tuple(dict.fromkeys(name for name, _ in plan)), "--kernel")
    kinds = known(kind or [], ("decode", "prefill"), "--kind")
    todo = [
        (name, case)
        for name, case in plan
        if (not kernels or name in kernels) and (not kinds or attention_cases.CASES[case].kind in kinds)
    ]
    results = _run("attention", todo, seconds, seed, json_file, {"kernel": kernel or [], "kind": kind or []})
    ours = [c for c in results["cells"] if c["kernel"] == attention_cases.OURS]
    _end(ours, lambda cell: cell["error_ratio"] > 2)


def ops(
    op: Annotated[list[str] | None, typer.Option(help="Only this operation; can be repeated.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or musa, if torch has both or vLLM neither. Default: vLLM's choice.")
    ] = None,
    seconds: _SECONDS = 60,
    seed: _SEED = 0,
    json_file: JsonFile = None,
) -> None:
    """Benchmark operations: the plugin's kernels and vLLM's own.

    Shows time, bandwidth and parity.

    Exit status: 1 a kernel of the plugin failed, or differs from the reference; 2 one of its cells was not measured.
    """
    chosen = known(op or [], op_cases.OPS, "--op")
    todo = [(name, case) for name, case in op_cases.plan() if not chosen or op_cases.CASES[case].op in chosen]
    named = known([] if device is None else [device], GPUS, "--device")
    only = {"op": op or [], **({"device": named} if named else {})}
    results = _run("ops", todo, seconds, seed, json_file, only, GPUS, device)
    ours = [c for c in results["cells"] if c["kernel"] == op_cases.OURS]
    _end(ours, lambda cell: cell["mismatch"] is not None)


def _end(ours: Sequence[Mapping[str, Any]], is_wrong: Callable[[Mapping[str, Any]], bool]) -> None:
    if any(c["status"] in (FAILED, CRASHED) for c in ours):
        raise typer.Exit(1)
    measured = [c for c in ours if c["status"] == MEASURED]
    if any(map(is_wrong, measured)):
        raise typer.Exit(1)
    if len(measured) < len(ours):
        raise typer.Exit(FAILURE)


def _run(
    kind: str,
    todo: Sequence[Cell],
    seconds: float,
    seed: int,
    json_file: Path | None,
    only: dict[str, list[str]],
    devices: Sequence[str] = ("cuda",),
    device: str | None = None,
) -> dict[str, Any]:
    console = console_for(json_file)
    host = bench.detect_host() if device is None else bench.detect_host(device=device)
    if host.device not in devices:
        raise bench.HostUnknown(
            f"`bench {kind}` needs a GPU, found {host.name} ({host.device}): run it on a host with a GPU, or "
            "`vllm-hwplugin demo` here"
        )
    console.print(f"vLLM {host.vllm} on {host.name}, torch {host.torch}", highlight=False)
    settings = {"seconds": seconds, "only": only, "seed": seed, "limit": _LIMITS[kind]}
    job = {"kind": kind, "device": host.device, "seed": seed}
    with progress(console) as bar:
        task = bar.add_task("starts", total=len(todo))

        def on_event(event: bench.Event) -> None:
            if event["event"] == "begin":
                bar.update(task, description=f"{event['kernel']}: {event['case']}")
            elif event["event"] == "cell":
                bar.update(task, advance=1)

        written = time.monotonic()

        def keep(outcomes: list[dict[str, Any]], processes: list[dict[str, Any]]) -> None:
            nonlocal written
            if json_file not in (None, STANDARD_OUTPUT) and time.monotonic() - written > _KEEP:
                write_text(results_text(make_results(kind, host, settings, outcomes, processes)), json_file)
                written = time.monotonic()

        outcomes, processes = supervise(job, todo, seconds=seconds, limit=_LIMITS[kind], on_event=on_event, keep=keep)
    results = make_results(kind, host, settings, outcomes, processes)
    if json_file is not None:
        write_text(results_text(results), json_file)
    console.print(summary(results))
    for line in left_out(results):
        console.print(line, markup=False, highlight=False)
    for process in processes:
        if process["error"] is not None:
            console.print(f"a process ended: {process['error']}. End of its log:", style="red")
            console.print(process["log_tail"], markup=False, highlight=False)
    return results
