# SPDX-License-Identifier: Apache-2.0
"""The results file of a benchmark: JSON, written anew after every engine, so that an interrupted run keeps its part."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_hwplugin import __version__

from ._host import Host
from ._job import Outcome
from ._plan import Case, Settings, synthetic_length
from ._rounds import phases_entry, rounds_entry

FORMAT = 2
#: Of the files of ``bench --profile``.
PHASES_FORMAT = "phases 1"


def commit() -> str | None:
    """The source tree's commit, with ``+`` when it has local changes; None for an installed wheel.

    ``HWPLUGIN_BENCH_COMMIT`` outweighs git: a copy of a tree on a measuring host may lie in some other repository.
    """
    if named := os.environ.get("HWPLUGIN_BENCH_COMMIT"):
        return named
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    try:
        head = _git(home, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(home, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or an unborn branch: the figures stand without it


def _git(home: Path, *arguments: str) -> str:
    command = ["git", "-C", str(home), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def provenance() -> dict[str, str | None]:
    """When a results file was made, and by what: the entries that every such file has."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": commit(),
    }


def new_results(host: Host, settings: Settings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "cases": [],
    }


def new_phases(host: Host, settings: Settings) -> dict[str, Any]:
    """An empty results file of ``bench --profile``."""
    return {**new_results(host, settings), "format": PHASES_FORMAT, "engines": []}


def add_phases(results: dict[str, Any], case: Case, sides: Mapping[str, Outcome]) -> None:
    """As :func:`add_case`, of ``bench --profile``: an entry an engine and batch size, and in ``cases`` what failed."""
    key = dataclasses.asdict(case)
    for part in ("cases", "engines"):
        results[part] = [one for one in results[part] if {name: one[name] for name in key} != key]
    errors = {side: {"error": outcome.error, "log_tail": outcome.log_tail} for side, outcome in sides.items()}
    results["cases"].append({**key, "sides": errors, "stopped": stopped(sides.values())})
    results["engines"] += [
        {
            **key,
            "side": side,
            "batch": workload.batch,
            "trace": workload.trace if workload.profile_tokens else None,
            "features": _used(outcome),
            **entry,
        }
        for side, outcome in sides.items()
        for workload in outcome.job.workloads
        if (entry := phases_entry(outcome, workload.name)) is not None
    ]


def _used(outcome: Outcome) -> list[str]:
    """The features that the engine's workers use."""
    return sorted({name for one in outcome.records for name, use in one["uses"].items() if use["used"]})


def add_case(results: dict[str, Any], case: Case, settings: Settings, sides: Mapping[str, Outcome]) -> None:
    """Put the sides of a case that are measured so far into ``results``, in place of what stood there of the case."""
    entry = {
        **dataclasses.asdict(case),
        "synthetic_acceptance_length": synthetic_length(case, settings),
        "sides": {side: _side(outcome) for side, outcome in sides.items()},
        "stopped": stopped(sides.values()),
    }
    key = dataclasses.asdict(case)
    kept = [c for c in results["cases"] if {k: c[k] for k in key} != key]
    results["cases"] = [*kept, entry]


def stopped(outcomes: Iterable[Outcome]) -> str | None:
    """What ended a run before everything was measured; None where nothing did."""
    return next((one.stopped for one in outcomes if one.stopped is not None), None)


def _side(outcome: Outcome) -> dict[str, Any]:
    ready = outcome.ready()
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "seconds": outcome.seconds,
        "start_seconds": ready.get("seconds"),
        "graph_modes": ready.get("graph_modes", {}),
        "model_runner": ready.get("model_runner"),
        "platform": ready.get("platform"),
        "environment": outcome.job.environment,
        "entry_points": ready.get("entry_points", {}),
        "batches": {str(w.batch): rounds_entry(outcome, w.name) for w in outcome.job.workloads},
        "processes": [dict(r) for r in outcome.records],
    }
