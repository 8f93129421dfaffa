# SPDX-License-Identifier: Apache-2.0
"""What the commands share that measure engines in turn: options, the engines of a case with a bar, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

#: What `MoreSidesOption` takes.
_MORE = (*ALL_SIDES, *PLUGIN_SIDES)
_ALL = f"{', '.join(ALL_SIDES)} (mrv2: Model Runner V2)"
SidesOption = Annotated[list[str] | None, typer.Option("--side", help=f"{_ALL}; repeat; default: all that run here.")]
MoreSidesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--side",
        help=f"{_ALL}; repeat; default: all that run here. Beside them {', '.join(PLUGIN_SIDES)}: with the plugin, and "
        "without what --patched-env sets.",
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
        help="An engine argument of vLLM's for all sides, as JSON or text: kv_cache_dtype=fp8.",
    ),
]
PatchedEnvOption = Annotated[
    list[str] | None, typer.Option("--patched-env", metavar="KEY=VAL", help="Set for patched sides only.")
]

GraphsOption = Annotated[str, typer.Option(help="vLLM's cudagraph_mode (GPU only); this is its own default.")]
#: Of `GraphsOption`.
GRAPHS = "FULL_AND_PIECEWISE"
#: Why there is no verdict.
NO_BASELINE = "no side with the plugin was measured next to its baseline"
TimeLimitOption = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds of the whole command, then what has been measured is written; default: none."),
]


def asked_sides(side: Sequence[str] | None, good: tuple[str, ...] = _MORE) -> tuple[str, ...]:
    """The sides that ``--side`` names, each once; none where it was not given.

    Raises:
        typer.BadParameter: one is not among ``good``.
    """
    return tuple(known(list(dict.fromkeys(side or ())), good, "--side"))


def show_host(host: Host, console: Console) -> None:
    console.print(f"vLLM {host.vllm} on {host.name} ({host.device}), torch {host.torch}", highlight=False)


def progress(console: Console) -> Progress:
    """A bar for measurements."""
    text = TextColumn("{task.description}", markup=False)
    return Progress(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def advance(bar: Progress, task: Any, label: str) -> Callable[[Event], None]:
    """Move a bar on with each thing that an engine says, its warm-up, its trial and its end apart."""

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
    """Say what ended the command early, and end it by what failed.

    Args:
        cases: of a results file: of each side, its ``error``, and what the case was ``stopped`` by.
        console: for a reader.
        measured: whether the file holds a figure.

    Raises:
        typer.Exit: 1 where a patched side failed whose stock did not, or had none beside it; 2 for any other failure,
            and where something was left out.
    """
    early = [case["stopped"] for case in cases if case["stopped"] is not None]
    for reason in early:
        said = f"Not everything was measured: {reason}. What was is in the results."
        console.print(said if measured else f"Nothing was measured: {reason}.", style="yellow", highlight=False)
    errors = [{side: entry["error"] for side, entry in case["sides"].items()} for case in cases]
    for failed in errors:
        if any(error and not failed.get(STOCK_OF[side]) for side, error in failed.items() if side in STOCK_OF):
            raise typer.Exit(1)
    if early or any(error for failed in errors for error in failed.values()):
        raise typer.Exit(FAILURE)


def show_verdicts(found: Iterable[Compared], device: str | None, console: Console, why_none: str = NO_BASELINE) -> None:
    """Say what was gained, case by case, and why no more; ``why_none``: why nothing was compared."""
    lines = [f"Verdict: {verdict(one, device)}" for one in found]
    for line in lines or [f"No verdict: {why_none}."]:
        console.print(line, style="bold", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class InTurn:
    """What all cases of a command have in common.

    Attributes:
        bar: shows how far a case is, and why an engine failed.
        results: are written after each round, except to standard output.
        json_file: where to.
        rounds: of each measurement and side.
        timeout: seconds for a start, and for each measurement.
        limit: of the whole command.
        module: of the engines' processes.
    """

    bar: Progress
    results: Mapping[str, Any]
    json_file: JsonFile
    rounds: int
    timeout: float
    limit: TimeLimit
    module: str = SERVING

    def write(self) -> None:
        """Write the results, except to standard output.

        Raises:
            OutputError: the file cannot be written; says why.
        """
        if self.json_file is not None and self.json_file != STANDARD_OUTPUT:
            write_text(results_text(self.results), self.json_file)

    def end(self, console: Console, show: Callable[[Mapping[str, Any], Console], bool]) -> None:
        """Write and show the results, and end the command by what failed.

        Args:
            console: for a reader.
            show: prints the results; whether they hold a figure.
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
            jobs: side -> its engine.
            measurements: what each side is asked for.
            label: of the case.
            total: events that the bar waits for.
            at_once: see :func:`..bench.measure_in_turn`.
            add: puts what has been measured so far into the results, in place of what it had put there.

        Returns:
            Whether the command goes on with the next case.
        """

        def keep(outcomes: Mapping[str, Outcome]) -> None:
            add(outcomes)
            try:
                self.write()
            except OutputError as error:
                # What is still measured is worth more; the command's own last write fails for it.
                self.bar.console.print(f"{error}; measuring goes on", style="yellow", markup=False)

        task = self.bar.add_task(f"{label}: engines start", total=total)
        outcomes = measure_in_turn(
            jobs,
            measurements,
            rounds=self.rounds,
            at_once=at_once,
            timeout=self.timeout,
            limit=self.limit,
            rest=rest_between_turns(self.results.get("host", {}).get("device")),
            module=self.module,
            on_event=advance(self.bar, task, label),
            keep=keep,
        )
        keep(outcomes)
        for outcome in outcomes.values():
            show_failure(outcome.job.label, outcome.error, outcome.log_tail, self.bar.console)
        return stopped(outcomes.values()) is None
