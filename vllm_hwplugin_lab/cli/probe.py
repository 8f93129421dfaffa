# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin probe``: run what the attention backends declare on this host's device."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_hwplugin.cli.output import write_text
from vllm_hwplugin.cli.parser import FAILURE

from ..bench import provenance, results_text
from ..probe import CAPABILITIES, Job
from ..probe import probe as run_probe
from ._options import JsonFile, console_for, known, runs

_DECLARED = {"yes": "declared", "no": "not declared", "unasked": "vLLM does not ask"}


def probe(
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="As vLLM names it, or module.Class; default: all that the host can use."),
    ] = None,
    capability: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(CAPABILITIES)}; default: all.")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Random batches for each value of a capability.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Same seed, same batches; default: new ones in every run.")] = None,
    factor: Annotated[float, typer.Option(min=1, help="Allowed error, in errors of PyTorch's SDPA.")] = 2.0,
    strict: Annotated[bool, typer.Option("--strict", help="What works and is not declared is a failure.")] = False,
    json_file: JsonFile = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one batch, compilation included; the trial has then crashed.")
    ] = 120,
) -> None:
    """Ask this host's attention backends whether they do what they say, and what they can beyond that.

    Each value of each capability runs through vLLM's real backend on random batches, against attention in float64.
    Exit status 1 where a declaration and the behaviour differ, each difference with its shape; 2 where no backend could
    be tried.
    """
    console = console_for(json_file)
    job = Job(
        backends=tuple(backend or ()),
        capabilities=tuple(known(capability or [], CAPABILITIES, "--capability")),
        seed=secrets.randbits(31) if seed is None else seed,
        cases=cases,
        factor=factor,
        patience=timeout,
    )
    report = run_probe(job, strict=strict, on_result=lambda result: _show(result, console))
    if json_file is not None:
        write_text(results_text({**provenance(), **report}, tables=False), json_file)
    _sum_up(report, console)
    if not report["ok"]:
        raise typer.Exit(1)
    if not report["results"]:
        raise typer.Exit(FAILURE)


def _show(result: Mapping[str, Any], console: Console) -> None:
    fails, verdict = result["fails"], result["verdict"]
    style = "red" if fails else "green" if verdict == "holds" else "yellow"
    ratio = "" if result["ratio"] is None else f", {result['ratio']:.2f} of SDPA's error"
    console.print(
        f"{escape(result['backend'])} {result['capability']} {result['value']}: [{style}]{verdict}[/] "
        f"({_DECLARED[result['declared']]}{ratio})",
        highlight=False,
        soft_wrap=True,
    )
    if fails or verdict not in ("holds", "refused"):
        console.out(f"    {result['detail']}\n    {result['shape']}", highlight=False)


def _sum_up(report: Mapping[str, Any], console: Console) -> None:
    for one in report["backends"]:
        if one["left_out"] is not None:
            console.out(f"left out: {one['left_out']}", highlight=False)
    host, settings, results = report["host"], report["settings"], report["results"]
    failed = sum(one["fails"] for one in results)
    console.out(
        f"vLLM {host['vllm']}, torch {host['torch']}, {host['device']} ({host['name']}); seed {settings['seed']}, "
        f"{settings['cases']} batches each: {len(results)} tried, {failed} "
        f"{'differs from its' if failed == 1 else 'differ from their'} declaration",
        highlight=False,
    )
    if not results:
        console.print("no backend of this host could be tried", style="red")


run = runs("probe", probe, "vllm-hwplugin probe", "vllm-hwplugin probe --json probe.json")
