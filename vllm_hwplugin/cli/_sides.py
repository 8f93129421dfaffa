# SPDX-License-Identifier: Apache-2.0
"""What the commands share that measure engines side by side: options, progress, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..bench import ALL_SIDES, Event, Outcome
from ._app import FAILURE

SidesOption = Annotated[
    list[str] | None,
    typer.Option("--side", help=f"{', '.join(ALL_SIDES)} (mrv2: Model Runner V2); repeat; default: all that run here."),
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

#: Patched side -> the one that says whether its failure is the plugin's.
_STOCK_OF = {"patched": "stock", "mrv2-patched": "mrv2"}


def progress(console: Console) -> Progress:
    """A bar for measurements."""
    text = TextColumn("{task.description}")
    return Progress(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def advance(bar: Progress, task: Any, label: str) -> Callable[[Event], None]:
    """Move a bar on with each thing that an engine says, its warm-up and its end apart."""

    def on_event(event: Event) -> None:
        if event["event"] not in ("warm", "done"):
            bar.update(task, advance=1, description=f"{label}: {event.get('workload', 'engines start')}")

    return on_event


def show_failure(outcome: Outcome, console: Console) -> None:
    """Print why an engine failed, if it did."""
    if outcome.error is not None:
        console.print(f"{outcome.job.label} failed: {outcome.error}. End of its log:", style="red")
        console.print(outcome.log_tail, markup=False, highlight=False)


def conclude(errors: Sequence[Mapping[str, str | None]]) -> None:
    """End the command by what failed: side -> error, of each comparison.

    Raises:
        typer.Exit: 1 where a patched side failed whose stock did not, or had none beside it; 2 for any other failure.
    """
    for failed in errors:
        if any(error and not failed.get(_STOCK_OF[side]) for side, error in failed.items() if side in _STOCK_OF):
            raise typer.Exit(1)
    if any(error for failed in errors for error in failed.values()):
        raise typer.Exit(FAILURE)
