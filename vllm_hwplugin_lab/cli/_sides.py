# SPDX-License-Identifier: Apache-2.0
"""Shared parts of commands that measure engines in turn: options, progress, and exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, OutputError, write_text
from vllm_hwplugin.cli.parser import FAILURE

from ..bench import ALL_SIDES, Event, Host, Job, Outcome, TimeLimit, measure_in_turn, results_text
from ..bench.plan import PLUGIN_SIDES, STOCK_OF
from ..bench.results import stopped
from ..bench.table import Compared, verdict
from ..bench.turns import SERVING, Measurement, rest_between_turns
from ._options import JsonFile, known

#: Values of `MoreSidesOption`.
_MORE = (*ALL_SIDES, *PLUGIN_SIDES)
_ALL = f"{', '.join(ALL_SIDES)} (`stock`: unpatched; `mrv2`: Model Runner V2)"
SidesOption = Annotated[
    list[str] | None, typer.Option("--side", help=f"{_ALL}; can be repeated; default: all that run here.")
]
MoreSidesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--side",
        help=f"{_ALL}; can be repeated; default: all that run here. Also {', '.join(PLUGIN_SIDES)}: with the plugin, "
        "but without --patched-env.",
    ),
]
UtilizationOption = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1.0, help="vLLM's gpu_memory_utilization of each engine; default: an equal part of 0.9."
    ),
]
VllmEnvOption = Annotated[list[str] | None, typer.Option("--vllm-env", metavar="KEY=VAL", help="Set for all sides.")]
VllmArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vllm-arg",
        metavar="KEY=VAL",
        help="An engine argument of vLLM for all sides, as JSON or text: kv_cache_dtype=fp8.",
    ),
]
PatchedEnvOption = Annotated[
    list[str] | None, typer.Option("--patched-env", metavar="KEY=VAL", help="Set for patched sides only.")
]

GraphsOption = Annotated[str, typer.Option(help="vLLM's cudagraph_mode (only with a GPU); the default is vLLM's.")]
#: Default of `GraphsOption`.
GRAPHS = "FULL_AND_PIECEWISE"
#: Why there is no verdict.
NO_BASELINE = "no side with the plugin was measured next to its baseline"
TimeLimitOption = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds of the whole command; what was measured until then is written; default: none."),
]


def asked_sides(side: Sequence[str] | None, good: tuple[str, ...] = _MORE) -> tuple[str, ...]:
    """Return the sides of ``--side``; raise typer.BadParameter for unknown ones."""
    return tuple(known(list(dict.fromkeys(side or ())), good, "--side"))


def show_host(host: Host, console: Console) -> None:
    console.print(f"vLLM {host.vllm} on {host.name} ({host.device}), torch {host.torch}", highlight=False)


def progress(console: Console) -> Progress:
    """Return a progress bar for measurements."""
    text = TextColumn("{task.description}", markup=False)
    return Progress(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def advance(bar: Progress, task: Any, label: str) -> Callable[[Event], None]:
    """Return a callback that advances a bar with an engine's events.

    Warm-ups, trials and ends do not count.
    """

    def on_event(event: Event) -> None:
        if event["event"] not in ("warm", "tried", "collected", "said", "done"):
            bar.update(task, advance=1, description=f"{label}: {event.get('workload', 'engines start')}")

    return on_event


def show_failure(name: str, error: str | None, log_tail: str, console: Console) -> None:
    """Print why an engine failed, if it did."""
    if error is not None:
        console.print(f"{name} failed: {error}. End of its log:", style="red", highlight=False)
        console.print(log_tail, markup=False, highlight=False, soft_wrap=True)


def conclude(cases: Sequence[Mapping[str, Any]], console: Console, *, measured: bool) -> None:
    """Print why the command ended early, and exit by its failures.

    Args:
        cases: Cases of a results file, with each side's ``error`` and the case's ``stopped``.
        measured: Whether the file holds a figure.

    Raises:
        typer.Exit: 1: a patched side failed, and its baseline did not or was not measured; 2: any other failure, or an
            incomplete measurement.
    """
    early = [case["stopped"] for case in cases if case["stopped"] is not None]
    for reason in early:
        text = f"Not everything was measured: {reason}. The results hold the rest."
        console.print(text if measured else f"Nothing was measured: {reason}.", style="yellow", highlight=False)
    errors = [{side: entry["error"] for side, entry in case["sides"].items()} for case in cases]
    for failed in errors:
        if any(error and not failed.get(STOCK_OF[side]) for side, error in failed.items() if side in STOCK_OF):
            raise typer.Exit(1)
    if early or any(error for failed in errors for error in failed.values()):
        raise typer.Exit(FAILURE)


def show_verdicts(
    comparisons: Iterable[Compared], device: str | None, console: Console, why_none: str = NO_BASELINE
) -> None:
    """Print a verdict per comparison, or ``why_none``."""
    lines = [f"Verdict: {verdict(comparison, device)}" for comparison in comparisons]
    for line in lines or [f"No verdict: {why_none}."]:
        console.print(line, style="bold", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class InTurn:
    """The shared state of all cases of a command.

    Attributes:
        results: Written after each round, except to standard output.
        rounds: Rounds of each measurement and side.
        timeout: Seconds for a start, and for each measurement.
        lock: See :func:`..bench.measure_in_turn`.
        module: Module of the engines' processes.
    """

    bar: Progress
    results: Mapping[str, Any]
    json_file: JsonFile
    rounds: int
    timeout: float
    limit: TimeLimit
    module: str = SERVING
    lock: Path | None = None

    def write(self) -> None:
        """Write the results, except to standard output; raises OutputError."""
        if self.json_file is not None and self.json_file != STANDARD_OUTPUT:
            write_text(results_text(self.results), self.json_file)

    def end(self, console: Console, show: Callable[[Mapping[str, Any], Console], bool]) -> None:
        """Write and show the results, and exit by the failures.

        ``show`` prints the results, and returns whether they hold a figure.
        """
        if self.json_file == STANDARD_OUTPUT:
            write_text(results_text(self.results), self.json_file)
        measured = show(self.results, console)
        self.write()
        conclude(self.results["cases"], console, measured=measured)

    def measure(
        self,
        jobs: Mapping[str, Job],
        measurements: Sequence[Measurement],
        *,
        label: str,
        total: int,
        at_once: bool,
        add: Callable[[Mapping[str, Outcome]], None],
    ) -> bool:
        """Measure a case.

        Args:
            total: Number of events, for the bar.
            at_once: See :func:`..bench.measure_in_turn`.
            add: Puts the measurements so far into the results, replacing earlier ones.

        Returns:
            Whether to continue with the next case.
        """

        def keep(outcomes: Mapping[str, Outcome]) -> None:
            add(outcomes)
            try:
                self.write()
            except OutputError as error:
                # The remaining measurements are worth more; the command's last write raises.
                self.bar.console.print(f"{error}; measuring continues", style="yellow", markup=False)

        task = self.bar.add_task(f"{label}: engines start", total=total)
        outcomes = measure_in_turn(
            jobs,
            measurements,
            rounds=self.rounds,
            at_once=at_once,
            timeout=self.timeout,
            limit=self.limit,
            rest=rest_between_turns(self.results.get("host", {}).get("device")),
            lock=self.lock,
            module=self.module,
            on_event=advance(self.bar, task, label),
            keep=keep,
        )
        keep(outcomes)
        for outcome in outcomes.values():
            show_failure(outcome.job.label, outcome.error, outcome.log_tail, self.bar.console)
        return stopped(outcomes.values()) is None
