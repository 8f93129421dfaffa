# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench soak``: thousands of steps under a load with changing batch sizes."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_hwplugin.cli.output import write_text
from vllm_hwplugin.cli.parser import FAILURE

from .. import bench
from ..bench import ALL_SIDES, results_text
from ..bench import soak as soaking
from ..bench.plan import STOCK_OF, TINY, check, possible_sides
from ..bench.results import new_results
from ..bench.soak import run_soak
from ..bench.table import SIDE_NAMES
from ._options import JsonFile, console_for, known, pairs, settings_of
from ._sides import (
    GRAPHS,
    GraphsOption,
    PatchedEnvOption,
    SidesOption,
    VllmEnvOption,
    asked_sides,
    progress,
    show_failure,
    show_host,
)

_PROMPTS = 96


def soak(
    context: typer.Context,
    method: Annotated[str, typer.Option(help="dflash or eagle3.")] = "dflash",
    k: Annotated[int | None, typer.Option("--k", min=1, help="Drafted tokens per step; default 7 or 3.")] = None,
    steps: Annotated[int, typer.Option(min=60, help="Steps of each engine under load.")] = 10_000,
    max_num_seqs: Annotated[int, typer.Option(min=2, help="Most concurrent requests.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    side: SidesOption = None,
    under: Annotated[str, typer.Option(metavar="COMMAND", help="Run the engines under this command; see above.")] = "",
    cudagraph_mode: GraphsOption = GRAPHS,
    vllm_env: VllmEnvOption = None,
    patched_env: PatchedEnvOption = None,
    model: Annotated[Path | None, typer.Option(help="Folder of checkpoints, such as tests/assets/small.")] = None,
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds per engine, with its start.")] = 3600,
    time_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds after which the loads end, with fewer steps; default: none."),
    ] = None,
) -> None:
    """Run thousands of steps with random requests; check texts and acceptance.

    Texts must be the target's greedy choices, and acceptance must reach unpatched vLLM's.

    On a GPU the engines of all sides, on both model runners, run at the same time. Unpatched vLLM without speculation
    reads each text again: every token must be its first choice, except for near-ties of bfloat16. If a runner has both
    sides and 10,000 drafts of each, no position's acceptance may be more than 0.01 below the unpatched side's; with
    fewer drafts, chance moves it by more. Exit status: 1 a condition failed, 2 an unpatched engine or the engine that
    reads the texts failed.

    Memory errors: --under "compute-sanitizer --tool memcheck --error-exitcode 99" --side patched --steps 60
    """
    begun_at = time.time()
    console = console_for(json_file)
    known([method], tuple(bench.DRAFT_TOKENS), "--method")
    wanted = asked_sides(side, ALL_SIDES)
    checker = tuple(shlex.split(under))
    if checker and shutil.which(checker[0]) is None:
        raise typer.BadParameter(f"{checker[0]!r} is not on PATH", param_hint="--under")
    checkpoints = bench.find_checkpoints(model)
    pool = bench.load_prompts(checkpoints, _PROMPTS)
    host = bench.detect_host()
    settings = settings_of(
        soaking.SoakSettings,
        context,
        k=k or bench.DRAFT_TOKENS[method],
        under=checker,
        vllm_environment=pairs(vllm_env or (), "--vllm-env"),
        patched_environment=pairs(patched_env or (), "--patched-env"),
        sides=(sides := wanted or possible_sides([method], host)),
    )
    check([bench.Case(TINY, method, settings.k)], host, sides)
    show_host(host, console)
    load = settings.load(None if time_limit is None else begun_at + time_limit)
    jobs = {side: soaking.load_job(side, settings, host, checkpoints, pool) for side in sides}
    judge = soaking.judging_job(settings, host, checkpoints)
    with progress(console) as bar:
        tasks = {job.label: bar.add_task(f"{job.label}: engine starts", total=steps) for job in jobs.values()}

        def on_event(name: str, event: bench.Event) -> None:
            if name in tasks and event["event"] in ("ready", "progress"):
                bar.update(tasks[name], description=f"{name}: steps", completed=event.get("steps", 0))

        soaked = run_soak(
            jobs, judge, load, at_once=host.device != "cpu", timeout=timeout, under=checker, on_event=on_event
        )
    entries = {side: soaking.side_entry(side, soaked) for side in jobs}
    failures = soaking.failures(entries, settings, host.device)
    failed = {name: ended for name, ended in soaked.ended.items() if ended.error is not None}
    failures += [f"{name}: {ended.error}" for name, ended in failed.items() if name not in jobs]
    result = new_results(soaking.FORMAT, host, settings)
    result |= {"ok": not failures, "failures": failures, "sides": entries}
    if json_file is not None:
        write_text(results_text(result), json_file)
    _show(result, console)
    for name, ended in failed.items():
        show_failure(name, ended.error, ended.log_tail, console)
    if any(name not in STOCK_OF for name in failed):
        raise typer.Exit(FAILURE)
    if failures:
        raise typer.Exit(1)


def _show(result: Mapping[str, Any], console: Console) -> None:
    for name, side in result["sides"].items():
        if side["error"] is not None:
            continue
        sizes = side["batch_sizes"]
        console.print(
            f"{SIDE_NAMES[name]}: {side['steps']} steps, {side['requests']} requests, {side['tokens']} tokens in "
            f"{side['seconds']:.0f} s; batch sizes {min(map(int, sizes))} to {max(map(int, sizes))} ({len(sizes)} "
            f"different); {side['mixed_steps']} steps mixed\n"
            f"  drafted in {side['draft_phases']} phases, {side['draft_phases_in_graphs']} of them in graphs; graphs "
            f"replayed: {', '.join(f'{part} {count}' for part, count in side['graph_replays'].items())}\n"
            f"  features used: {', '.join(side['features']) or 'none'}\n"
            f"  accepted per position: {' '.join(f'{share:.3f}' for share in side['acceptance_per_position'])}\n"
            f"  {side['texts']['count']} texts, tokens that are not the first choice: "
            f"{_share(side['texts']['not_first_choice'])}, at most {_nats(side['texts']['worst_gap'])} below it",
            highlight=False,
        )
    for failure in result["failures"]:
        console.print(f"failed: {failure}", style="red", highlight=False)


def _share(value: float | None) -> str:
    return "not judged" if value is None else f"{value:.3%}"


def _nats(value: float | None) -> str:
    return "not judged" if value is None else f"{value:.4f} nats"
