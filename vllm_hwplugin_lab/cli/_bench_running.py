# SPDX-License-Identifier: Apache-2.0
"""``bench serve --url`` and ``--against``: measure a running server, and compare two runs of one load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from vllm_hwplugin.cli.parser import FAILURE

from ..bench import Outcome, TimeLimit, running
from ..bench import serve as serving
from ..bench.results import put_case
from ..bench.table import of_loads
from ._options import JsonFile, given, settings_of
from ._serve_report import show
from ._sides import InTurn, progress

#: Defaults of options that can be repeated.
_DEFAULTS: Mapping[str, float] = {"temperature": 0.0, "concurrency": 16, "request_rate": 0.0}


def measure_running(
    context: typer.Context,
    url: str,
    against: Sequence[Path],
    json_file: JsonFile,
    html: Path | None,
    timeout: float,
    limit: TimeLimit,
    console: Console,
) -> None:
    """Measure a running server; compare it with a run in a file.

    Raises:
        ServerSilent: The URL does not answer as a vLLM server.
        NoRun: The file holds no such run.
        AnotherLoad: The options ask for another load than that run's.
        typer.Exit: As :func:`compare_runs`; also if the server failed.
    """
    before = running.read_run(against[0]) if against else None
    settings, prompts = _settings(context, url.rstrip("/").removesuffix("/v1"), before)
    results = running.new_results(settings)
    if before is not None:
        running.same_load(before["settings"], results["settings"])
    console.print(f"{settings.model} at {settings.url}", highlight=False)
    # By default vLLM's client looks for a tokenizer with the name in the requests.
    sent = dataclasses.replace(settings, client=("--tokenizer", settings.checkpoint, *settings.client))
    measurements = serving.serve_measurements(sent, prompts or None, before and running.round_sizes(before))
    with progress(console) as bar:
        turns = InTurn(bar, results, json_file, settings.rounds, timeout, limit, serving.MODULE)

        def add(outcomes: Mapping[str, Outcome]) -> None:
            put_case(results, {}, outcomes, lambda outcome: running.server_entry(outcome, settings))

        turns.measure(
            {running.SIDE: running.job(settings)},
            measurements,
            label=settings.url,
            total=1 + settings.rounds * len(measurements),
            at_once=False,
            add=add,
        )
    if before is None:
        turns.end(console, partial(show, html=html))
        return
    turns.end(console, lambda after, shown: show(running.compared(before, after), shown, html))
    _end_by(running.compared(before, results))


def compare_runs(before: Path, after: Path, console: Console, html: Path | None) -> None:
    """Compare two runs of one load.

    Raises:
        NoRun: A file holds no such run.
        AnotherLoad: The loads differ.
        typer.Exit: 1: a load is slower than before; 2: rounds differ more than the runs.
    """
    both = running.compared(running.read_run(before), running.read_run(after))
    show(both, console, html)
    _end_by(both)


def _end_by(both: Mapping[str, Any]) -> None:
    outcomes = {comparison.outcome for comparison in of_loads(both)}
    if outcomes & {"slower", "mixed"}:
        raise typer.Exit(1)
    if not outcomes - {"unknown"}:
        raise typer.Exit(FAILURE)


def _settings(
    context: typer.Context, url: str, before: Mapping[str, Any] | None
) -> tuple[running.RunningSettings, list[serving.Prompt]]:
    """Return the settings of this run, and the prompts of its file."""
    # Options that are not given have the values of the run before.
    asked = context.params | {name: context.params[name] or [value] for name, value in _DEFAULTS.items()}
    client = tuple(context.args)
    if before is not None:
        settings, load = before["settings"], {field.name for field in dataclasses.fields(serving.LoadSettings)}
        asked |= {name: settings[name] for name in load if not given(context, name)}
        client = client or tuple(settings["client"])
    if asked["ignore_eos"] is None:
        asked["ignore_eos"] = asked["prompts"] is None
    prompts: list[serving.Prompt] = []
    if asked["prompts"] is not None:
        prompts += serving.read_prompts(Path(asked["prompts"]))
        asked["prompts"] = str(asked["prompts"])
    asked |= {name: tuple(dict.fromkeys(asked[name])) for name in _DEFAULTS} | {"client": client}
    model, checkpoint = running.served_by(url)
    more = {"url": url, "model": model, "checkpoint": checkpoint, "prompts_sha256": running.digest(prompts)}
    return settings_of(running.RunningSettings, context, **{**asked, **more}), prompts
