# SPDX-License-Identifier: Apache-2.0
"""One case's engines in turn, with a bar, and the results file as new as what has been measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, OutputError, write_text

from ..bench import (
    SERVING,
    Job,
    Measurement,
    Outcome,
    TimeLimit,
    measure_in_turn,
    rest_between_turns,
    results_text,
    stopped,
)
from ._options import JsonFile
from ._sides import advance, conclude, show_failure


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
            rest=rest_between_turns(self.results["host"]["device"]),
            module=self.module,
            on_event=advance(self.bar, task, label),
            keep=keep,
        )
        keep(outcomes)
        for outcome in outcomes.values():
            show_failure(outcome, self.bar.console)
        return stopped(outcomes.values()) is None
