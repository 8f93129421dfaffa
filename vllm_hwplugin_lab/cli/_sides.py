# SPDX-License-Identifier: Apache-2.0
"""What the commands share that measure engines side by side: options, progress, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_hwplugin.cli.parser import FAILURE

from ..bench import ALL_SIDES, PLUGIN_SIDES, STOCK_OF, Event, Outcome
from ._options import known

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
PatchedEnvOption = Annotated[
    list[str] | None, typer.Option("--patched-env", metavar="KEY=VAL", help="Set for patched sides only.")
]

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


def progress(console: Console) -> Progress:
    """A bar for measurements."""
    text = TextColumn("{task.description}")
    return Progress(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def advance(bar: Progress, task: Any, label: str) -> Callable[[Event], None]:
    """Move a bar on with each thing that an engine says, its warm-up and its end apart."""

    def on_event(event: Event) -> None:
        if event["event"] not in ("warm", "collected", "done"):
            bar.update(task, advance=1, description=f"{label}: {event.get('workload', 'engines start')}")

    return on_event


def show_failure(outcome: Outcome, console: Console) -> None:
    """Print why an engine failed, if it did."""
    if outcome.error is not None:
        console.print(f"{outcome.job.label} failed: {outcome.error}. End of its log:", style="red")
        console.print(outcome.log_tail, markup=False, highlight=False)


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
