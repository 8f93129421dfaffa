# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin demo``: unpatched and patched vLLM on tiny trained checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_hwplugin.cli.output import write_json
from vllm_hwplugin.cli.parser import FAILURE
from vllm_hwplugin.spec_decode.engine_report import sentence

from .. import bench
from ..bench.results import telling_line
from ..bench.table import worth
from ._options import JsonFile, console_for, runs
from ._sides import advance, progress, show_host

WORKLOAD = "demo"
#: A run takes a second or less, so the best of some runs counts. A CPU needs one round: no speed is shown, because runs
#: of one engine differ more than unpatched and patched engines.
ROUNDS = 3
#: A smaller difference of tokens per step is not reported.
_SAME = 0.01


@dataclass(frozen=True)
class Configuration:
    """An engine of the demo; ``method`` None: only the target."""

    name: str
    method: str | None
    patched: bool


CONFIGURATIONS = (
    Configuration("no speculation", None, False),
    Configuration("Eagle3 unpatched", "eagle3", False),
    Configuration("Eagle3 patched", "eagle3", True),
    Configuration("DFlash unpatched", "dflash", False),
    Configuration("DFlash patched", "dflash", True),
)


def demo(
    json_file: JsonFile = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with target, eagle3, dflash and prompts.json.")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Number of prompts.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens per prompt.")] = 64,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for an engine's start, and each round.")] = 900,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show all features and decisions of each process.")
    ] = False,
) -> None:
    """Compare unpatched and patched vLLM on tiny trained checkpoints.

    Runs it without speculation, with Eagle3 and with DFlash, and compares texts and acceptance.

    Unpatched means VLLM_HWPLUGIN=0; on MUSA, where vLLM has no platform, only the plugin's platform class.
    On a GPU also tokens/s: the best of a few rounds after a warm-up round.
    Exit status: 1 texts differ that must be equal, or a patched engine failed whose baseline ran; 2 another engine
    failed.
    """
    console = console_for(json_file)
    checkpoints = bench.find_checkpoints(model)
    bench.load_prompts(checkpoints, prompts)
    host = bench.detect_host()
    show_host(host, console)
    if host.device == "musa":
        console.print(
            "Unpatched: the plugin's platform class with every feature off, because vLLM has no platform for MUSA."
        )
    jobs = [job_for(c, host, checkpoints, prompts, tokens) for c in CONFIGURATIONS]
    outcomes = run_all(jobs, timeout, console)
    result = compare(outcomes, host)
    show(result, console, verbose=verbose)
    console.print(f"Verdict: {verdict(result)}", style="bold", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(result, json_file)
    raise typer.Exit(exit_status(result))


def job_for(
    configuration: Configuration, host: bench.Host, checkpoints: bench.Checkpoints, prompts: int, tokens: int
) -> bench.Job:
    options = bench.engine_options(host.device, max_model_len=512, cudagraph_mode="FULL", max_num_seqs=128)
    options["model"] = str(checkpoints.target)
    if configuration.method is not None:
        options["speculative_config"] = {
            "method": configuration.method,
            "model": str(checkpoints.drafter(configuration.method)),
            "num_speculative_tokens": bench.DRAFT_TOKENS[configuration.method],
        }
    timed = _is_timed(host.device)
    workload = bench.Workload(
        WORKLOAD,
        bench.load_prompts(checkpoints, prompts),
        tokens,
        batch=prompts,
        rounds=ROUNDS if timed else 1,
        warmup_tokens=tokens if timed else 0,
        keep_texts=True,
    )
    return bench.Job(
        label=configuration.name,
        patched=configuration.patched,
        options=options,
        environment=bench.engine_environment(host.device, patched=configuration.patched),
        workloads=(workload,),
    )


def run_all(jobs: Sequence[bench.Job], timeout: float, console: Console) -> list[bench.Outcome]:
    """Run one engine after the other, so that figures are independent."""
    outcomes = []
    with progress(console) as bar:
        for job in jobs:
            # The start, and the rounds.
            task = bar.add_task(f"{job.label}: engine starts", total=1 + job.measurements)
            outcomes.append(bench.launch(job, timeout=timeout, on_event=advance(bar, task, job.label)))
            bar.update(task, description=f"{job.label}: {'failed' if outcomes[-1].error else 'done'}")
    return outcomes


def compare(outcomes: Sequence[bench.Outcome], host: bench.Host) -> dict[str, Any]:
    """Return the demo's result as JSON, one row per configuration.

    Texts are compared with the run without speculation.
    """
    reference = outcomes[0].texts(WORKLOAD)
    rows = []
    for outcome in outcomes:
        texts = outcome.texts(WORKLOAD)
        summary = bench.rounds_entry(outcome, WORKLOAD)
        speed = summary["tokens_per_second"]["best"] if summary and _is_timed(host.device) else None
        rows.append(
            {
                "name": outcome.job.label,
                "method": outcome.job.options.get("speculative_config", {}).get("method"),
                "patched": outcome.job.patched,
                "environment": outcome.job.environment,
                "error": outcome.error,
                "log_tail": outcome.log_tail,
                "seconds": outcome.seconds,
                "texts_equal": None if texts is None or reference is None else equal_texts(texts, reference),
                "texts": None if texts is None else len(texts),
                "tokens_per_second": speed,
                "drafts": summary and summary["drafts"] // summary["rounds"],
                "acceptance_length": summary and summary["acceptance_length"],
                "acceptance_per_position": summary and summary["acceptance_per_position"],
                "graph_modes": outcome.ready().get("graph_modes", {}),
                "platform": outcome.ready().get("platform"),
                "processes": [dict(r) for r in outcome.records],
            }
        )
    result = {"host": dataclasses.asdict(host), "configurations": rows}
    return {"ok": exit_status(result) == 0, **result}


def exit_status(result: Mapping[str, Any]) -> int:
    """Return 0 (correct), 1 (the plugin is wrong) or 2 (not known).

    2: an engine failed, which shows nothing about the plugin.
    """
    rows = result["configurations"]
    # On a GPU, in bfloat16, near-ties depend on the batch's shape, so a differing text is shown but not a failure.
    exact = result["host"]["device"] == "cpu"
    if exact and any(row["texts_equal"] is not None and row["texts_equal"] != row["texts"] for row in rows):
        return 1
    ran = {row["method"] for row in rows if not row["patched"] and row["error"] is None}
    if any(row["patched"] and row["error"] is not None and row["method"] in ran for row in rows):
        return 1
    return FAILURE if any(row["error"] is not None for row in rows) else 0


def _is_timed(device: str) -> bool:
    return device != "cpu"


def equal_texts(texts: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(texts, reference, strict=True))


def show(result: Mapping[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print the table, and a line per process.

    Args:
        verbose: Also print unused features with reasons, features that this vLLM does not need, decisions, and the
            platform class.
    """
    timed = _is_timed(result["host"]["device"])
    table = Table(title="Equal prompts, greedy: tokens per step, and acceptance of each drafted position")
    table.add_column("configuration", no_wrap=True)
    if timed:
        table.add_column("tokens/s", justify="right")
        table.add_column("CUDA graphs")
    for name in ("drafts", "tokens per step"):
        table.add_column(name, justify="right")
    table.add_column("accepted per position")
    table.add_column("texts equal", justify="right")
    for row in result["configurations"]:
        if row["texts"] is None:
            table.add_row(row["name"], "failed")
            continue
        drafted = bool(row["drafts"])
        table.add_row(
            row["name"],
            *((f"{row['tokens_per_second']:.0f}", _graphs(row)) if timed else ()),
            str(row["drafts"]) if drafted else "",
            f"{row['acceptance_length']:.3f}" if drafted else "",
            " ".join(f"{a:.2f}" for a in row["acceptance_per_position"]),
            "" if row["texts_equal"] is None else f"{row['texts_equal']}/{row['texts']}",
        )
    console.print(table)
    for row in result["configurations"]:
        for process in row["processes"]:
            console.print(_process_line(row["name"], process, verbose), highlight=False, markup=False, soft_wrap=True)
        if verbose and (line := _engine_line(row)):
            console.print(f"{row['name']}: {line}", highlight=False, markup=False, soft_wrap=True)
    baselines: dict[str | None, str] = {}
    for row in (row for row in result["configurations"] if row["error"] is not None):
        last = telling_line(row["log_tail"])
        same = row["patched"] and baselines.get(row["method"]) == last
        baselines.setdefault(row["method"], last)
        console.print(f"\n{row['name']} failed: {row['error']}. End of its log:", style="red", highlight=False)
        shown = f"as unpatched vLLM: {last}" if same else row["log_tail"]
        console.print(shown, markup=False, highlight=False, soft_wrap=True)


def verdict(result: Mapping[str, Any]) -> str:
    """Return the demo's result in one line, with the cause."""
    return " ".join(_verdict(result))


def _verdict(result: Mapping[str, Any]) -> Iterator[str]:
    rows = result["configurations"]
    failed = [row["name"] for row in rows if row["error"] is not None]
    differing = [row["name"] for row in rows if row["texts_equal"] is not None and row["texts_equal"] != row["texts"]]
    status = exit_status(result)
    yield {0: "OK.", 1: "NOT OK.", FAILURE: "not known, because unpatched vLLM fails on this host."}[status]
    if failed:
        yield f"Failed: {', '.join(failed)}."
    if differing:
        why = " (bfloat16 has near-ties)" if status == 0 else ""
        yield f"Texts differ from texts without speculation{why}: {', '.join(differing)}."
    elif not failed:
        yield "Every engine wrote the same texts."
    for baseline, patched in pairwise(rows):
        if not patched["patched"] or failed:
            continue
        if patched["tokens_per_second"]:
            ratio = patched["tokens_per_second"] / baseline["tokens_per_second"]
            yield f"{patched['name']}: speedup {worth([ratio])}."
        lengths = [row["acceptance_length"] or 0.0 for row in (baseline, patched)]
        if abs(lengths[1] - lengths[0]) > _SAME:
            uses = [use for process in patched["processes"] for use in process.get("uses", {}).items()]
            used = {name for name, use in uses if use["used"]}
            yield (
                f"{patched['name']} yields {lengths[0]:.2f} → {lengths[1]:.2f} tokens per step, with "
                f"{', '.join(sorted(used)) or 'no feature'}."
            )
    if not _is_timed(result["host"]["device"]):
        yield "No speed: CUDA graphs need a GPU."


def _graphs(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{who} {mode}" for who, mode in row["graph_modes"].items())


def _engine_line(row: Mapping[str, Any]) -> str:
    """Return an engine's own facts; empty if it never was ready."""
    parts = (("platform class", row["platform"]), ("CUDA graphs", _graphs(row)))
    return "; ".join(f"{name}: {value}" for name, value in parts if value)


def _process_line(name: str, process: Mapping[str, Any], verbose: bool) -> str:
    features = process["features"]
    live = [f for f, state in features.items() if state["state"] == "live"]
    # A process without a part of an engine, such as an engine core's caller, only reports what is patched in.
    uses = process.get("uses")
    shown = {name: use for name, use in (uses or {}).items() if verbose or use["used"]}
    features_used = sentence(shown) if uses else f"patched in: {', '.join(live) or 'nothing'}"
    line = f"{name}: process {process['pid']} ({process['role']}): {features_used}"
    odd = [f"{f} refused: {state['reason']}" for f, state in features.items() if state["state"] == "refused"]
    if process.get("error"):
        odd.append(f"error: {process['error']}")
    if not verbose:
        return "; ".join([line, *odd])
    rest = [f"{f} {state['state']}" for f, state in features.items() if state["state"] not in ("live", "refused")]
    decisions = [f"{key}: {text}" for key, text in process.get("decisions", {}).items()]
    return "\n  ".join(["; ".join([line, *odd, *rest]), *decisions])


run = runs("demo", demo, "vllm-hwplugin demo", "vllm-hwplugin demo --model tests/assets/small --json demo.json")
