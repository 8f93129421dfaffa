# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench``: benchmark unpatched and patched vLLM on both model runners, in turn.

Each side's engine core runs in its own process, as for users. With ``--profile FOLDER`` it shares its caller's, which
accesses its objects: that costs time, so these figures are not for comparisons of sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_hwplugin.cli.output import OutputError

from ..bench import (
    METHODS,
    NO_DRAFTS,
    SHAPES,
    Case,
    Job,
    Settings,
    TimeLimit,
    detect_host,
    find_checkpoints,
    job_for,
    load_prompts,
    of_workloads,
)
from ..bench.plan import TINY, check, possible_sides, shapes_folder
from ..bench.results import FORMAT, PHASES_FORMAT, add_case, add_phases, new_results
from ..bench.table import LEAST_US, host_line, of_engines, phases_of, profiled, rows, tables
from ..bench.turns import ENGINE, SERVING
from . import _bench_kernels
from ._bench_serve import SERVE, serve
from ._options import JsonFile, arguments, console_for, grouped, known, pairs, runs, settings_of
from ._sides import (
    GRAPHS,
    GraphsOption,
    InTurn,
    MoreSidesOption,
    PatchedEnvOption,
    TimeLimitOption,
    UtilizationOption,
    VllmArgOption,
    VllmEnvOption,
    asked_sides,
    progress,
    show_host,
    show_verdicts,
)
from ._soak import soak

_SHAPES = (TINY, *SHAPES)
_GROUPS = {
    "What to measure": ("shape", "method", "k", "batch", "model", "acceptance_length", "cudagraph_mode"),
    "Sides": ("side", "vllm_arg", "vllm_env", "patched_env", "gpu_memory_utilization"),
    "Rounds": ("rounds", "tokens", "tiny_prompts", "tiny_tokens", "profile_tokens"),
    "Results": ("json_file", "profile", "timeout", "time_limit"),
}
_EXAMPLES = (
    "vllm-hwplugin bench --shape 0.6b --method eagle3 --k 3 --json results.json",
    "vllm-hwplugin bench --shape 0.6b --side stock --side patched --profile traces",
)

bench = typer.Typer(
    add_completion=False, rich_markup_mode=None, cls=grouped(_GROUPS, *_EXAMPLES, base=typer.core.TyperGroup)
)
bench.command("serve", cls=SERVE, context_settings={"allow_extra_args": True})(serve)
for _name, _command, *_examples in (
    ("soak", soak, "bench soak", "bench soak --method dflash --json soak.json"),
    ("attention", _bench_kernels.attention, "bench attention", "bench attention --kind decode --json attention.json"),
    ("ops", _bench_kernels.ops, "bench ops", "bench ops --json ops.json"),
):
    bench.command(_name, cls=grouped({}, *(f"vllm-hwplugin {example}" for example in _examples)))(_command)


@bench.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(_SHAPES)}; can be repeated.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; can be repeated.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", min=1, help="Drafted tokens per step; can be repeated.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests; can be repeated (same engine).")
    ] = None,
    side: MoreSidesOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds per batch size and side.")] = 5,
    tokens: Annotated[int, typer.Option(min=8, max=380, help="New tokens per request, dummy shapes.")] = 256,
    tiny_prompts: Annotated[int, typer.Option(min=1, max=96, help="Prompts of the tiny shape.")] = 32,
    tiny_tokens: Annotated[int, typer.Option(min=8, max=380, help="New tokens per prompt, tiny shape.")] = 96,
    acceptance_length: Annotated[
        float | None, typer.Option(min=1, help="Synthetic acceptance length of dummy shapes; default 1 + k / 2.")
    ] = None,
    cudagraph_mode: GraphsOption = GRAPHS,
    gpu_memory_utilization: UtilizationOption = None,
    profile_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the profiled run (CUDA); 0: none.")] = 48,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            help="Instead: profile the host's time by function, and write traces for Perfetto to this folder.",
        ),
    ] = None,
    vllm_arg: VllmArgOption = None,
    vllm_env: VllmEnvOption = None,
    patched_env: PatchedEnvOption = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints of the tiny shape.")] = None,
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a start, and for each measurement.")] = 900,
    time_limit: TimeLimitOption = None,
) -> None:
    """Benchmark unpatched and patched vLLM on both model runners.

    Shows milliseconds per step, tokens/s, acceptance, and the GPU's idle share.

    The engines of a case run at the same time and take turns in short rounds; the best round counts. The time of a
    fixed piece of Python with each round shows the host's speed. A step counts while every request of the batch is
    drafting.

    The tiny shape runs trained checkpoints (real acceptance). The other shapes have the sizes of published models,
    dummy weights and vLLM's synthetic acceptance, and drafters for some methods; `none` means no speculation. No
    network is needed. The results have the end of a failed side's log. Exit status: 1 a patched side failed whose
    baseline ran, 2 any other failure, or an incomplete run (Ctrl-C, time limit): the results then have what all sides
    measured.
    """
    if context.invoked_subcommand is not None:
        return
    limit, console = TimeLimit(time_limit), console_for(json_file)
    methods = known(method or ["eagle3"], METHODS, "--method")
    shapes = known(shape or [TINY], _SHAPES, "--shape")
    planned = [
        Case(name, by, count) for name in shapes for by in methods for count in ([0] if by == NO_DRAFTS else k or [3])
    ]
    wanted = asked_sides(side)
    environments = {"vllm_environment": pairs(vllm_env or (), "--vllm-env")}
    environments["patched_environment"] = pairs(patched_env or (), "--patched-env")
    batches = tuple(dict.fromkeys(batch or (1, 8, 32)))
    checkpoints = None
    if TINY in shapes:
        checkpoints = find_checkpoints(model)
        load_prompts(checkpoints, max(tiny_prompts, *batches))
    host = detect_host()
    sides = wanted or possible_sides(methods, host)
    settings = settings_of(
        Settings,
        context,
        batches=batches,
        sides=sides,
        vllm_arguments=arguments(vllm_arg or (), "--vllm-arg"),
        **environments,
    )
    check(planned, host, sides)
    show_host(host, console)
    if profile is not None:
        _make(profile)
    results = new_results(FORMAT if profile is None else PHASES_FORMAT, host, settings)
    folder = shapes_folder()
    with progress(console) as bar:
        module, answer = (SERVING, "measured") if profile is None else (ENGINE, "phases")
        turns = InTurn(bar, results, json_file, settings.rounds, timeout, limit, module)
        for case in planned:
            jobs = {
                name: job_for(case, name, settings, host, checkpoints, folder, own_process=profile is None)
                for name in sides
            }
            add = partial(add_case, results, case, settings)
            if profile is not None:
                jobs = {name: _with_traces(job, profile) for name, job in jobs.items()}
                add = partial(add_phases, results, case)
            if not turns.measure(
                jobs,
                of_workloads(jobs, answer),
                label=case.label,
                total=sum(1 + job.measurements for job in jobs.values()),
                at_once=host.device != "cpu",
                add=add,
            ):
                break
    turns.end(console, _show if profile is None else _show_phases)


def _show(results: Mapping[str, Any], console: Console) -> bool:
    measured = any(side is not None for row in rows(results) for side in row.sides.values())
    if measured:
        for table in tables(results):
            console.print(table)
        console.print(host_line(results), highlight=False)
        show_verdicts(of_engines(results), results["host"]["device"], console)
    return measured


def _show_phases(results: Mapping[str, Any], console: Console) -> bool:
    engines = results.get("engines", ())
    for entry in engines:
        console.print(_phase_table(entry))
    return bool(engines)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created ({error.strerror}); name another folder") from error


def _with_traces(job: Job, folder: Path) -> Job:
    name = job.label.replace(" ", "-")
    workloads = tuple(
        dataclasses.replace(workload, trace=str(folder.resolve() / f"{name}-batch-{workload.batch}.json.gz"))
        for workload in job.workloads
    )
    return dataclasses.replace(job, workloads=workloads)


def _phase_table(entry: Mapping[str, Any]) -> Table:
    """Return a table of host time per step by phase."""
    # Times are in microseconds; the parts of a phase stand below it.
    busy = entry["profile"].get("gpu_busy_ms")
    gpu = f", GPU busy {busy:.2f} ms" if busy else ""
    title = f"{entry['shape']} {entry['method']} k={entry['k']}, {entry['side']}, batch {entry['batch']}"
    launches = ", ".join(
        f"{profiled(entry, name)} {name.replace('_', ' ')} ({profiled(entry, f'draft_{name}')} to draft)"
        for name in ("graph_launches", "kernel_launches")
    )
    caption = f"Per step; own: without the rows below. {launches}, {profiled(entry, 'copies')} copies."
    drawn = Table(title=f"{title}: {entry['step_ms']:.2f} ms per step{gpu}", caption=caption)
    for name in ("phase", "calls", "us", "own us"):
        drawn.add_column(name, justify="left" if name == "phase" else "right")
    for phase in (phase for phase in phases_of(entry["phases"]) if phase.us >= LEAST_US):
        indented = "  " * (len(phase.path) - 1) + phase.path[-1]
        drawn.add_row(indented, f"{phase.calls:.2f}", f"{phase.us:.0f}", f"{phase.own:.0f}")
    return drawn


run = runs("bench", bench)
