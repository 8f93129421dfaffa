# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench --profile FOLDER``: where the host's time of a step goes, and traces for Perfetto.

The engine is in the process of its caller, where its objects can be looked at, one engine after the other. So these are
no figures to compare sides by: that is what ``bench`` itself does.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench import (
    PHASES_FORMAT,
    Case,
    Checkpoints,
    Host,
    Outcome,
    Settings,
    job_for,
    launch,
    profiled,
    provenance,
    shown_phases,
)
from ._output import JsonFile, write_json
from ._sides import advance, conclude, progress, show_failure


def profile(
    planned: Sequence[Case],
    settings: Settings,
    host: Host,
    checkpoints: Checkpoints | None,
    folder: Path,
    json_file: JsonFile,
    console: Console,
    timeout: float,
) -> None:
    """Run every side of every case once, and print its table.

    Args:
        planned: the cases.
        settings: of ``bench``.
        host: this one.
        checkpoints: of the tiny shape.
        folder: for the traces; is made.
        json_file: for the results.
        console: for the tables.
        timeout: seconds for one engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries, errors = [], []
    with tempfile.TemporaryDirectory(prefix="hwplugin-shapes-") as shapes, progress(console) as bar:
        for case in planned:
            failed = {}
            for side in settings.sides:
                job = job_for(case, side, settings, host, checkpoints, Path(shapes))
                name = job.label.replace(" ", "-")
                workloads = tuple(
                    dataclasses.replace(
                        one,
                        rounds=1,
                        profile_tokens=settings.profile_tokens,
                        trace=str(folder.resolve() / f"{name}-batch-{one.batch}.json.gz"),
                    )
                    for one in job.workloads
                )
                job = dataclasses.replace(job, workloads=workloads)
                task = bar.add_task(job.label, total=1 + job.measurements)
                outcome = launch(job, timeout=timeout, on_event=advance(bar, task, job.label))
                show_failure(outcome, bar.console)
                failed[side] = outcome.error
                entries += entries_of(case, side, outcome)
            errors.append(failed)
    for entry in entries:
        console.print(phase_table(entry))
    if json_file is not None:
        facts = {"host": dataclasses.asdict(host), "settings": dataclasses.asdict(settings)}
        write_json({"format": PHASES_FORMAT, **provenance(), **facts, "engines": entries}, json_file)
    conclude(errors)


def entries_of(case: Case, side: str, outcome: Outcome) -> list[dict[str, Any]]:
    """What was found of each batch size of one side."""
    entries = []
    for workload in outcome.job.workloads:
        for event in outcome.of("phases", workload.name):
            summary = outcome.summary(workload.name)
            assert summary is not None  # measured before the phases
            entries.append(
                {
                    **dataclasses.asdict(case),
                    "side": side,
                    "batch": workload.batch,
                    "step_ms": summary["step_ms"],
                    "phases": event["rows"],
                    "profile": summary.get("profile", {}),
                    "trace": workload.trace if workload.profile_tokens else None,
                }
            )
    return entries


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
    for row, own in shown_phases(entry["phases"]):
        indented = "  " * (len(row["path"]) - 1) + row["path"][-1]
        drawn.add_row(indented, f"{row['calls']:.2f}", f"{row['us']:.0f}", f"{own:.0f}")
    return drawn
