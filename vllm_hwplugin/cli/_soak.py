# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench soak``: thousands of steps under a load whose batch size keeps changing."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import bench
from ..bench import SIDES, Ended, provenance, run_child
from ..bench import soak as soaking
from ._app import FAILURE
from ._options import known, pairs
from ._output import JsonFile, console_for, write_json

_PROMPTS = 96


def soak(
    method: Annotated[str, typer.Option(help="dflash or eagle3.")] = "dflash",
    k: Annotated[int | None, typer.Option("--k", min=1, help="Drafted tokens a step; default 7 or 3.")] = None,
    steps: Annotated[int, typer.Option(min=60, help="Steps of the engine under load.")] = 10_000,
    max_num_seqs: Annotated[int, typer.Option(min=2, help="Requests at once, at most.")] = 32,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    side: Annotated[list[str] | None, typer.Option(help="stock or patched; default both, in turn.")] = None,
    under: Annotated[str, typer.Option(metavar="COMMAND", help="Run the engines under it; see below.")] = "",
    cudagraph_mode: Annotated[str, typer.Option(help="vLLM's cudagraph_mode (GPU only).")] = "FULL",
    vllm_env: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Set for all engines.")] = None,
    patched_env: Annotated[list[str] | None, typer.Option(metavar="KEY=VAL", help="Set for patched only.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints, a folder as tests/assets/small.")] = None,
    json_file: JsonFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one engine, start included.")] = 3600,
) -> None:
    """Run many steps with requests that come and go at random, and hold texts and acceptance to stock vLLM's.

    Each text is read again by stock vLLM without speculation: every token has to be its first choice, near-ties of
    bfloat16 aside. With both sides and 10,000 drafts of each, no position's acceptance may be more than 0.01 below
    stock's; with fewer, chance alone moves it by more. Exit code 1 when something does not hold, 2 when stock's engine
    or the one that reads the texts failed.

    Memory faults: --under "compute-sanitizer --tool memcheck --error-exitcode 99" --side patched --steps 60
    """
    console = console_for(json_file)
    known([method], tuple(bench.DRAFT_TOKENS), "--method")
    sides = known(list(dict.fromkeys(side or SIDES)), SIDES, "--side")
    settings = soaking.SoakSettings(
        method=method,
        k=k or bench.DRAFT_TOKENS[method],
        steps=steps,
        max_num_seqs=max_num_seqs,
        seed=seed,
        cudagraph_mode=cudagraph_mode,
        under=tuple(shlex.split(under)),
        vllm_environment=pairs(vllm_env or (), "--vllm-env"),
        patched_environment=pairs(patched_env or (), "--patched-env"),
    )
    if settings.under and shutil.which(settings.under[0]) is None:
        raise typer.BadParameter(f"no command {settings.under[0]!r} on PATH", param_hint="--under")
    checkpoints = bench.find_checkpoints(model)
    pool = bench.load_prompts(checkpoints, _PROMPTS)
    host = bench.detect_host()
    console.print(f"vLLM {host.vllm} on {host.name} ({host.device}), torch {host.torch}", highlight=False)

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    ended: dict[str, Ended] = {}
    with Progress(*columns, console=console, transient=True) as bar:
        for name in sides:
            job = soaking.load_job(name, settings, host, checkpoints, pool)
            ended[name] = _run(job, timeout, bar, settings.under)
        texts = {name: soaking.texts_of(_event(one, "soaked")) for name, one in ended.items() if one.error is None}
        # Stock and patched mostly agree: each text is read once.
        different = list(dict.fromkeys(text for several in texts.values() for text in several))
        verdict = _run(soaking.judging_job(settings, host, checkpoints, different), timeout, bar) if different else None
    gaps = {}
    if verdict is not None and verdict.error is None:
        gaps = dict(zip(different, _event(verdict, "judged")["gaps"], strict=True))
    entries = {name: _entry(one, texts.get(name, []), gaps) for name, one in ended.items()}
    faults = soaking.failures(entries, settings, host.device)
    if verdict is not None and verdict.error is not None:
        faults.append(f"judge: {verdict.error}")
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
        write_json(result, json_file)
    _show(result, console)
    for name, one in {**ended, **({"judge": verdict} if verdict is not None else {})}.items():
        if one.error is not None:
            console.print(f"{name} failed: {one.error}. End of its log:", style="red")
            console.print(one.log_tail, markup=False, highlight=False)
    if (verdict is not None and verdict.error is not None) or ("stock" in ended and ended["stock"].error is not None):
        raise typer.Exit(FAILURE)
    if faults:
        raise typer.Exit(1)


def _run(job: soaking.SoakJob, timeout: float, bar: Progress, under: tuple[str, ...] = ()) -> Ended:
    task = bar.add_task(f"{job.label}: engine starts", total=max(job.steps, 1))

    def on_event(event: bench.Event) -> None:
        if event["event"] == "ready":
            bar.update(task, description=f"{job.label}: {'steps' if job.steps else 'reads the texts'}")
        elif event["event"] == "progress":
            bar.update(task, completed=event["steps"])

    ended = run_child(soaking.MODULE, job.to_json(), job.environment, timeout=timeout, on_event=on_event, under=under)
    bar.remove_task(task)
    bar.console.print(f"{job.label}: {'failed' if ended.error else 'done'} in {ended.seconds:.0f} s", highlight=False)
    return ended


def _event(ended: Ended, name: str) -> bench.Event:
    return next(event for event in ended.events if event["event"] == name)


def _entry(ended: Ended, texts: list[soaking.Text], gaps: Mapping[soaking.Text, list[float]]) -> dict[str, Any]:
    """One side for the results file: the texts themselves stay out of it."""
    entry: dict[str, Any] = {"error": ended.error, "log_tail": ended.log_tail}
    for event in ended.events:
        if event["event"] in ("ready", "soaked"):
            entry |= {key: value for key, value in event.items() if key not in ("event", "pid", "texts")}
    if ended.error is None:
        entry |= {"acceptance_per_position": soaking.acceptance(entry), "texts": soaking.judged(texts, gaps)}
    return {**entry, "processes": [dict(record) for record in ended.records]}


def _show(result: Mapping[str, Any], console: Console) -> None:
    for name, side in result["sides"].items():
        if side["error"] is not None:
            continue
        sizes = side["batch_sizes"]
        console.print(
            f"{name}: {side['steps']} steps, {side['requests']} requests, {side['tokens']} tokens in "
            f"{side['seconds']:.0f} s; batch sizes {min(map(int, sizes))} to {max(map(int, sizes))} ({len(sizes)} "
            f"different); {side['mixed_steps']} steps mixed\n"
            f"  drafted in {side['draft_phases']} phases, {side['draft_phases_in_graphs']} of them in graphs; graphs "
            f"replayed: target {side['graph_replays']['target']}, draft {side['graph_replays']['draft']}\n"
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
