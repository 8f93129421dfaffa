# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin probe``: check the declared capabilities of attention backends on this host's device."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
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
        typer.Option(metavar="NAME", help="vLLM's name, or module.Class; default: all backends of this host."),
    ] = None,
    capability: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(CAPABILITIES)}; default: all.")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Random batches per value of a capability.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Seed of the batches; default: random.")] = None,
    factor: Annotated[float, typer.Option(min=1, help="Allowed error, in units of the error of PyTorch's SDPA.")] = 2.0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if something works that is not declared.")] = False,
    json_file: JsonFile = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds per batch, with compilation; a slower trial counts as crashed.")
    ] = 120,
) -> None:
    """Check each attention backend's declared capabilities against a PyTorch reference.

    Runs each value of each capability through vLLM's backend on random batches, and compares with attention in float64.
    ``probe musa`` compares a Moore Threads GPU with torch on the CPU instead.

    Exit status: 0 as declared, 1 a backend differs from its declaration (printed with the shape), 2 no backend could be
    tried.
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
    for backend in report["backends"]:
        if backend["left_out"] is not None:
            console.out(f"left out: {backend['left_out']}", highlight=False)
    host, settings, results = report["host"], report["settings"], report["results"]
    failed = sum(result["fails"] for result in results)
    console.out(
        f"vLLM {host['vllm']}, torch {host['torch']}, {host['device']} ({host['name']}); seed {settings['seed']}, "
        f"{settings['cases']} batches per trial: {len(results)} trials, {failed} "
        f"{'differs from its' if failed == 1 else 'differ from their'} declaration",
        highlight=False,
    )
    if not results:
        console.print("no backend of this host could be tried", style="red")


def probe_musa(json_file: JsonFile = None) -> None:
    """Compare each Moore Threads GPU with torch on the CPU.

    The checks are of what the vendor's sources report as wrong.

    Exit status: 0 nothing wrong, 1 a result is wrong or a check cannot run, 2 the host has no Moore Threads GPU.
    """
    console = console_for(json_file)
    import torch
    from vllm.platforms import current_platform

    if current_platform.device_type != "musa":
        console.print(f"no Moore Threads GPU: vLLM's platform is {current_platform.device_type}", style="red")
        raise typer.Exit(FAILURE)
    checks = importlib.import_module("vllm_hwplugin.musa.self_test_checks")
    gpus, ok = [], True
    for index in range(torch.musa.device_count()):
        device = torch.device(f"musa:{index}")
        host, results = checks.this_host(device), checks.run(device)
        gpus.append({"host": host, "checks": [result._asdict() for result in results]})
        console.out(f"{host['gpu']} {host['uuid']}, driver {host['driver'] or 'unknown'}", highlight=False)
        for result in results:
            ok &= result.state in ("right", "skipped")
            console.out(f"    {result} ({result.seconds:.3f} s)", highlight=False)
    if json_file is not None:
        write_text(results_text({**provenance(), "gpus": gpus, "ok": ok}, tables=False), json_file)
    if not ok:
        raise typer.Exit(1)


_run = runs(
    "probe",
    probe,
    "vllm-hwplugin probe",
    "vllm-hwplugin probe --json probe.json",
    "vllm-hwplugin probe musa --json gpu.json",
)
_run_musa = runs("probe musa", probe_musa, "vllm-hwplugin probe musa --json gpu.json")


def run(arguments: Sequence[str]) -> int:
    """Run the probe of attention backends, or of a Moore Threads GPU."""
    return _run_musa(arguments[1:]) if arguments[:1] == ["musa"] else _run(arguments)
