# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench --profile FOLDER``: where the host's time of a step goes, and traces for Perfetto.

The engines are in the processes of their callers, where their objects can be looked at, and looking costs time. So
these are no figures to compare sides by: that is what ``bench`` itself does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, OutputError, write_text

from ..bench import (
    ENGINE,
    Case,
    Checkpoints,
    Host,
    Job,
    Settings,
    TimeLimit,
    add_phases,
    job_for,
    new_phases,
    of_workloads,
    profiled,
    results_text,
    shapes_folder,
    shown_phases,
)
from ._in_turn import InTurn
from ._options import JsonFile
from ._sides import conclude, progress


def profile(
    planned: Sequence[Case],
    settings: Settings,
    host: Host,
    checkpoints: Checkpoints | None,
    folder: Path,
    json_file: JsonFile,
    console: Console,
    timeout: float,
    limit: TimeLimit,
) -> None:
    """Look at every side of every case, the sides of a case in turn, and print their tables.

    Args:
        planned: the cases.
        settings: of ``bench``.
        host: this one.
        checkpoints: of the tiny shape.
        folder: for the traces; is made.
        json_file: for the results.
        console: for the tables.
        timeout: seconds for a start, and for each measurement.
        limit: of the whole.

    Raises:
        OutputError: the folder cannot be made, or a file not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror}); name another folder") from error
    results = new_phases(host, settings)
    shapes = shapes_folder()
    with progress(console) as bar:
        turns = InTurn(bar, results, json_file, settings.rounds, timeout, limit, ENGINE)
        for case in planned:
            jobs = {
                side: _with_traces(job_for(case, side, settings, host, checkpoints, shapes), folder)
                for side in settings.sides
            }
            if not turns.measure(
                jobs,
                of_workloads(jobs, "phases"),
                label=case.label,
                total=sum(1 + job.measurements for job in jobs.values()),
                at_once=host.device != "cpu",
                add=partial(add_phases, results, case),
            ):
                break
    if json_file == STANDARD_OUTPUT:
        write_text(results_text(results), json_file)
    for entry in results["engines"]:
        console.print(phase_table(entry))
    turns.write()
    conclude(results["cases"], console, measured=bool(results["engines"]))


def _with_traces(job: Job, folder: Path) -> Job:
    name = job.label.replace(" ", "-")
    workloads = tuple(
        dataclasses.replace(one, trace=str(folder.resolve() / f"{name}-batch-{one.batch}.json.gz"))
        for one in job.workloads
    )
    return dataclasses.replace(job, workloads=workloads)


def phase_table(entry: Mapping[str, Any]) -> Table:
    """Host microseconds of a step by phase; the parts of a phase stand below it."""
    busy = entry["profile"].get("gpu_busy_ms")
    gpu = f", GPU busy {busy:.2f} ms" if busy else ""
    title = f"{entry['shape']} {entry['method']} k={entry['k']}, {entry['side']}, batch {entry['batch']}"
    launches = ", ".join(
        f"{profiled(entry, name)} {name.replace('_', ' ')} ({profiled(entry, f'draft_{name}')} to draft)"
        for name in ("graph_launches", "kernel_launches")
    )
    caption = f"Of a step; own: what no row below says. {launches}, {profiled(entry, 'copies')} copies."
    drawn = Table(title=f"{title}: {entry['step_ms']:.2f} ms a step{gpu}", caption=caption)
    for name in ("phase", "calls", "us", "own us"):
        drawn.add_column(name, justify="left" if name == "phase" else "right")
    for one in shown_phases(entry["phases"]):
        indented = "  " * (len(one.path) - 1) + one.path[-1]
        drawn.add_row(indented, f"{one.calls:.2f}", f"{one.us:.0f}", f"{one.own:.0f}")
    return drawn
