# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench soak``: thousands of steps under a load whose batch size keeps changing."""

from __future__ import annotations

import dataclasses
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
from ..bench import ALL_SIDES, SIDE_NAMES, Ended, processes_entry, provenance, results_text
from ..bench import soak as soaking
from ..bench.soak import run_soak
from ._options import JsonFile, console_for, known, pairs
from ._sides import PatchedEnvOption, SidesOption, VllmEnvOption, asked_sides, progress

_PROMPTS = 96


def soak(
    method: Annotated[str, typer.Option(help="dflash or eagle3.")] = "dflash",
    k: Annotated[int | None, typer.Option("--k", min=1, help="Drafted tokens a step; default 7 or 3.")] = None,
    steps: Annotated[int, typer.Option(min=60, help="Steps of each engine under load.")] = 10_000,
    max_num_seqs: Annotated[int, typer.Option(min=2, help="Requests at once, at most.")] = 32,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    side: SidesOption = None,
    under: Annotated[str, typer.Option(metavar="COMMAND", help="Run the engines under it; see below.")] = "",
    cudagraph_mode: Annotated[
        str, typer.Option(help="vLLM's cudagraph_mode (GPU only); this is its own default.")
    ] = "FULL_AND_PIECEWISE",
    vllm_env: VllmEnvOption = None,
    patched_env: PatchedEnvOption = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints, a folder as tests/assets/small.")] = None,
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one engine, start included.")] = 3600,
    time_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds after which the loads end, with fewer steps than asked for; default: none."),
    ] = None,
) -> None:
    """Run many steps with requests that come and go at random, and hold texts and acceptance to stock vLLM's.

    The engines of all sides, on both model runners, run at the same time on a GPU. Each text is read again by stock
    vLLM without speculation: every token has to be its first choice, near-ties of bfloat16 aside. With stock and
    patched of a runner and 10,000 drafts of each, no position's acceptance may be more than 0.01 below stock's; with
    fewer, chance alone moves it by more. Exit code 1 when something does not hold, 2 when stock's engine or the one
    that reads the texts failed.

    Memory faults: --under "compute-sanitizer --tool memcheck --error-exitcode 99" --side patched --steps 60
    """
    asked_at = time.time()
    console = console_for(json_file)
    known([method], tuple(bench.DRAFT_TOKENS), "--method")
    wanted = asked_sides(side, ALL_SIDES)
    checker = tuple(shlex.split(under))
    if checker and shutil.which(checker[0]) is None:
        raise typer.BadParameter(f"no command {checker[0]!r} on PATH", param_hint="--under")
    checkpoints = bench.find_checkpoints(model)
    pool = bench.load_prompts(checkpoints, _PROMPTS)
    host = bench.detect_host()
    sides = wanted or bench.possible_sides([method], host)
    settings = soaking.SoakSettings(
        method=method,
        k=k or bench.DRAFT_TOKENS[method],
        steps=steps,
        max_num_seqs=max_num_seqs,
        seed=seed,
        cudagraph_mode=cudagraph_mode,
        under=checker,
        vllm_environment=pairs(vllm_env or (), "--vllm-env"),
        patched_environment=pairs(patched_env or (), "--patched-env"),
        sides=sides,
        time_limit=time_limit,
    )
    bench.check([bench.Case(bench.TINY, method, settings.k)], host, sides)
    console.print(f"vLLM {host.vllm} on {host.name} ({host.device}), torch {host.torch}", highlight=False)

    until = None if time_limit is None else asked_at + time_limit
    jobs = {one: soaking.load_job(one, settings, host, checkpoints, pool, until) for one in sides}
    judge = soaking.judging_job(settings, host, checkpoints)
    with progress(console) as bar:
        tasks = {job.label: bar.add_task(f"{job.label}: engine starts", total=job.steps or 1) for job in jobs.values()}

        def on_event(name: str, event: bench.Event) -> None:
            if name in tasks and event["event"] in ("ready", "progress"):
                bar.update(tasks[name], description=f"{name}: steps", completed=event.get("steps", 0))

        found = run_soak(
            jobs, judge, at_once=host.device != "cpu", timeout=timeout, under=settings.under, on_event=on_event
        )
    entries = {name: _entry(one, found.texts.get(name, []), found.gaps) for name, one in found.ended.items()}
    faults = soaking.failures(entries, settings, host.device)
    if found.judge is not None and found.judge.error is not None:
        faults.append(f"judge: {found.judge.error}")
    result = {
        "format": soaking.FORMAT,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": dataclasses.asdict(settings),
        "ok": not faults,
        "failures": faults,
        "sides": entries,
    }
    if json_file is not None:
        write_text(results_text(result), json_file)
    _show(result, console)
    everyone = {**found.ended, **({"judge": found.judge} if found.judge is not None else {})}
    for name, one in everyone.items():
        if one.error is not None:
            console.print(f"{name} failed: {one.error}. End of its log:", style="red")
            console.print(one.log_tail, markup=False, highlight=False)
    if any(one.error is not None for name, one in everyone.items() if name not in bench.STOCK_OF):
        raise typer.Exit(FAILURE)
    if faults:
        raise typer.Exit(1)


def _entry(ended: Ended, texts: list[soaking.Text], gaps: Mapping[soaking.Text, list[float]]) -> dict[str, Any]:
    """One side for the results file: the texts themselves stay out of it."""
    entry: dict[str, Any] = {"error": ended.error, "log_tail": ended.log_tail}
    for event in ended.events:
        if event["event"] in ("ready", "soaked"):
            entry |= {key: value for key, value in event.items() if key not in ("event", "pid", "texts")}
    if ended.error is None:
        entry |= {"acceptance_per_position": soaking.acceptance(entry), "texts": soaking.judged(texts, gaps)}
    used = sorted({feature for one in ended.records for feature, use in one["uses"].items() if use["used"]})
    return {**entry, "features": used, "processes": processes_entry(ended.records)}


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
            f"{_share(side['texts']['not_first_choice'])}, the furthest {_nats(side['texts']['worst_gap'])} below it",
            highlight=False,
        )
    for fault in result["failures"]:
        console.print(f"does not hold: {fault}", style="red", highlight=False)


def _share(value: float | None) -> str:
    return "not judged" if value is None else f"{value:.3%}"


def _nats(value: float | None) -> str:
    return "not judged" if value is None else f"{value:.4f} nats"
