# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench``: stock and patched vLLM in turn, each in a fresh process on the same machine.

``--mrv2`` adds a third side, stock vLLM on Model Runner V2.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..bench import (
    MRV2,
    SHAPES,
    SIDES,
    TINY,
    Case,
    Event,
    Settings,
    add_case,
    cases,
    check,
    detect_host,
    find_checkpoints,
    job_for,
    launch,
    load_prompts,
    new_results,
    table,
)
from . import _bench_kernels
from ._app import FAILURE
from ._options import known, pairs
from ._output import STANDARD_OUTPUT, JsonFile, console_for, write_json
from ._soak import soak

bench = typer.Typer(add_completion=False)
bench.command("soak")(soak)
bench.command("attention")(_bench_kernels.attention)
bench.command("ops")(_bench_kernels.ops)

_SHAPES = (TINY, *SHAPES)
_METHODS = ("eagle3", "dflash")


@bench.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(_SHAPES)}; repeat for several.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="eagle3 or dflash; repeat for several.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", min=1, help="Drafted tokens a step; repeat.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; repeat (same engine).")] = None,
    mrv2: Annotated[bool, typer.Option("--mrv2", help="Also stock vLLM on Model Runner V2 (GPU only).")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each batch size.")] = 3,
    tokens: Annotated[int, typer.Option(min=8, max=380, help="New tokens a request, dummy shapes.")] = 256,
    tiny_prompts: Annotated[int, typer.Option(min=1, max=96, help="Prompts of the tiny shape.")] = 32,
    tiny_tokens: Annotated[int, typer.Option(min=8, max=380, help="New tokens a prompt, tiny shape.")] = 96,
    acceptance_length: Annotated[
        float | None, typer.Option(min=1, help="Synthetic acceptance of the dummy shapes; default 1 + k / 2.")
    ] = None,
    cudagraph_mode: Annotated[str, typer.Option(help="vLLM's cudagraph_mode (GPU only).")] = "FULL",
    profile_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the profiled run (CUDA); 0: none.")] = 48,
    vllm_env: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Set for all sides.")] = None,
    patched_env: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Set for patched only.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints of the tiny shape.")] = None,
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one engine, start included.")] = 900,
) -> None:
    """Measure stock and patched in turn: tokens/s, milliseconds a verify step, acceptance, and launches by profile.

    The tiny shape runs trained checkpoints (real acceptance). The others have Qwen3's sizes, dummy weights and vLLM's
    synthetic acceptance. Needs no network. A side that failed has its log's end in the results; exit code 1 when the
    patched one failed where stock ran, 2 when it is another.
    """
    if context.invoked_subcommand is not None:
        return
    console = console_for(json_file)
    planned = cases(
        known(shape or [TINY], _SHAPES, "--shape"), known(method or ["eagle3"], _METHODS, "--method"), k or [3]
    )
    settings = Settings(
        batches=tuple(batch or (1, 8, 32)),
        rounds=rounds,
        cudagraph_mode=cudagraph_mode,
        tokens=tokens,
        tiny_prompts=tiny_prompts,
        tiny_tokens=tiny_tokens,
        acceptance_length=acceptance_length,
        profile_tokens=profile_tokens,
        vllm_environment=pairs(vllm_env or (), "--vllm-env"),
        patched_environment=pairs(patched_env or (), "--patched-env"),
    )
    checkpoints = None
    if any(c.shape == TINY for c in planned):
        checkpoints = find_checkpoints(model)
        load_prompts(checkpoints, max(settings.tiny_prompts, *settings.batches))
    host = detect_host()
    sides = (*SIDES, MRV2) if mrv2 else SIDES
    check(planned, host, sides)
    results = new_results(host, settings)
    console.print(f"vLLM {host.vllm} on {host.name} ({host.device}), torch {host.torch}", highlight=False)

    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="hwplugin-shapes-") as folder, Progress(*columns, console=console) as bar:
        jobs = [(c, s, job_for(c, s, settings, host, checkpoints, Path(folder))) for c in planned for s in sides]
        task = bar.add_task("", total=sum(1 + job.measurements for _, _, job in jobs))
        finished = 0
        outcomes: dict[Case, dict[str, Any]] = {}
        for case, side, job in jobs:
            bar.update(task, completed=finished, description=job.label)
            outcome = launch(job, timeout=timeout, on_event=_advance(bar, task))
            finished += 1 + job.measurements
            outcomes.setdefault(case, {})[side] = outcome
            add_case(results, case, settings, outcomes[case])
            if json_file is not None and json_file != STANDARD_OUTPUT:
                write_json(results, json_file)
            if outcome.error is not None:
                bar.console.print(f"{job.label} failed: {outcome.error}. End of its log:", style="red")
                bar.console.print(outcome.log_tail, markup=False, highlight=False)
        bar.update(task, completed=finished, description="done")
    if json_file == STANDARD_OUTPUT:
        write_json(results, json_file)
    console.print(table(results))
    errors = [{name: side["error"] for name, side in case["sides"].items()} for case in results["cases"]]
    if any(failed["patched"] and not failed["stock"] for failed in errors):
        raise typer.Exit(1)
    if any(error for failed in errors for error in failed.values()):
        raise typer.Exit(FAILURE)


def _advance(bar: Progress, task: Any) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if event["event"] != "done":
            bar.update(task, advance=1)

    return on_event
