# SPDX-License-Identifier: Apache-2.0
"""Results files in JSON, written after every round, so that an interrupted run keeps its part."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_hwplugin import __version__

from ._host import Host
from ._job import Event, Outcome, acceptance_length
from ._launch import EXCEPTION
from .plan import Asked, Case, synthetic_length

FORMAT = 3
#: The format of ``bench --profile``'s files.
PHASES_FORMAT = "phases 2"
#: Width of a line, without closing brackets.
_WIDTH = 110
_DIGITS = 11
#: Fewest objects of a table.
_TABLE = 8


def commit() -> str | None:
    """Return the source tree's commit, with ``+`` for local changes.

    None: an installed wheel. ``HWPLUGIN_BENCH_COMMIT`` overrides git: on a measuring host a copy of the tree may lie in
    another repository.
    """
    if named := os.environ.get("HWPLUGIN_BENCH_COMMIT"):
        return named
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    # Twelve digits of HEAD, regardless of tags.
    command = ["git", "-C", str(home), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or no commit


def provenance() -> dict[str, str | None]:
    """Return the date, the version and the commit of a results file."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": commit(),
    }


def new_results(form: Any, host: Host, settings: Asked) -> dict[str, Any]:
    """Return an empty results file of a format."""
    return {
        "format": form,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "cases": [],
    }


def put_case(
    results: dict[str, Any],
    key: Mapping[str, Any],
    sides: Mapping[str, Outcome],
    entry: Callable[[Outcome], Any],
    **more: Any,
) -> None:
    """Put a case, identified by ``key``, into ``results``, or replace it."""
    others = [case for case in results["cases"] if any(case[name] != value for name, value in key.items())]
    entries = {side: entry(outcome) for side, outcome in sides.items()}
    results["cases"] = [*others, {**key, **more, "sides": entries, "stopped": stopped(sides.values())}]


def add_case(results: dict[str, Any], case: Case, settings: Asked, sides: Mapping[str, Outcome]) -> None:
    """Call :func:`put_case` for ``bench``."""
    length = synthetic_length(case, settings.acceptance_length)
    put_case(results, dataclasses.asdict(case), sides, _side, synthetic_acceptance_length=length)


def add_phases(results: dict[str, Any], case: Case, sides: Mapping[str, Outcome]) -> None:
    """Call :func:`put_case` for ``bench --profile``.

    ``cases`` has errors, ``engines`` an entry per batch size.
    """
    key = dataclasses.asdict(case)
    put_case(
        results,
        key,
        sides,
        lambda outcome: {
            "error": outcome.error,
            "log_tail": outcome.log_tail,
            "processes": processes_entry(outcome.records),
        },
    )
    others = [entry for entry in results.get("engines", ()) if {name: entry[name] for name in key} != key]
    results["engines"] = [
        *others,
        *(
            {
                **key,
                "side": side,
                "batch": workload.batch,
                "trace": workload.trace if workload.profile_tokens else None,
                "features": used_features(outcome.records),
                **entry,
            }
            for side, outcome in sides.items()
            for workload in outcome.job.workloads
            if (entry := phases_entry(outcome, workload.name)) is not None
        ),
    ]


def used_features(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the features that an engine's processes use."""
    return sorted({name for record in records for name, use in record["uses"].items() if use["used"]})


def stopped(outcomes: Iterable[Outcome]) -> str | None:
    """Return what ended a run early, or None."""
    return next((outcome.stopped for outcome in outcomes if outcome.stopped is not None), None)


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
        "processes": processes_entry(outcome.records),
    }


def processes_entry(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the processes' run records, without repetitions.

    The fingerprint determines the patched modules; settings and commit determine why a feature is off.
    """
    records = list(records)
    states: dict[str, dict[str, str]] = {"live": {}, "refused": {}, "used": {}}
    decided: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for feature, entry in record["features"].items():
            if entry["state"] in states:
                states[entry["state"]][feature] = entry["reason"]
        states["used"] |= {feature: use["reason"] for feature, use in record["uses"].items() if use["used"]}
        for name, text in record["decisions"].items():
            decided.setdefault(name, {}).setdefault(record["role"], []).append(text)
    fields = {
        "roles": [record["role"] for record in records],
        "fingerprints": list(dict.fromkeys(record["fingerprint"] for record in records if record["fingerprint"])),
        "live": sorted(states["live"]),
        "refused": states["refused"],
        "used": states["used"],
        # A worker decides after its parents; different decisions of an engine's workers are worth showing.
        "decisions": {name: " | ".join(dict.fromkeys([*by_role.values()][-1])) for name, by_role in decided.items()},
        "notes": list(dict.fromkeys(note for record in records for note in record["notes"])),
        "errors": list(dict.fromkeys(record["error"] for record in records if record["error"])),
    }
    return {name: value for name, value in fields.items() if value}


def results_text(results: Mapping[str, Any], *, tables: bool = True) -> str:
    """Return JSON in filled lines, with `_DIGITS` significant digits.

    Args:
        tables: Write a long list of similar objects as an object of ``columns`` and ``rows``; a field that an object
            lacks is null. False: other programs can read the file without this format.
    """
    return _filled(_compact(results, tables=tables)) + "\n"


def read_results(text: str) -> Any:
    """Return what :func:`results_text` was given; raise ValueError for other text."""
    return json.loads(text, object_hook=_objects)


def _compact(value: Any, *, tables: bool) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _compact(field, tables=tables) for key, field in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    entries = [_compact(entry, tables=tables) for entry in value]
    if tables and len(entries) >= _TABLE and all(isinstance(entry, dict) for entry in entries):
        columns = max((list(entry) for entry in entries), key=len)
        plain = not any(isinstance(field, (dict, list)) for entry in entries for field in entry.values())
        if plain and all(set(entry) <= set(columns) for entry in entries):
            return {"columns": columns, "rows": [[entry.get(key) for key in columns] for entry in entries]}
    return entries


def _objects(value: dict[str, Any]) -> Any:
    if value.keys() != {"columns", "rows"}:
        return value
    return [dict(zip(value["columns"], row, strict=True)) for row in value["rows"]]


def _filled(value: Any, depth: int = 0, before: int = 0) -> str:
    """Return a value in lines, after ``before`` columns in its first line."""
    whole = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or depth + before + len(whole) < _WIDTH:
        return whole
    if isinstance(value, dict):
        keys = {key: f"{json.dumps(str(key))}: " for key in value}
        parts = [f"{keys[key]}{_filled(field, depth + 1, len(keys[key]))}" for key, field in value.items()]
    else:
        parts = [_filled(entry, depth + 1) for entry in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = [""]
    for part in parts:
        full = depth + (before if len(lines) == 1 else 0) + len(lines[-1]) + len(part) > _WIDTH
        if lines[-1] and (full or "\n" in part or "\n" in lines[-1]):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{part},"
    return begin + ("\n" + " " * (depth + 1)).join(lines)[:-1] + end


def rounds_entry(outcome: Outcome, workload: str) -> dict[str, Any] | None:
    """Return a workload's measurements; None: no step was measured.

    Time per step: the best round, because a shared host only adds time. Tokens per step: all rounds, because they are
    random.
    """
    rounds = [event for event in outcome.of("measured", workload) if event["steps"]]
    if not rounds:
        return None
    steps = [1e3 * event["seconds"] / event["steps"] for event in rounds]
    best, median = min(steps), statistics.median(steps)
    tokens = sum(event["tokens"] for event in rounds) / sum(event["steps"] for event in rounds)
    entry: dict[str, Any] = {
        "rounds": len(rounds),
        "step_ms": {"best": best, "median": median, "all": steps},
        "tokens_per_step": tokens,
        "tokens_per_second": {
            "best": 1e3 * tokens / best,
            "median": 1e3 * tokens / median,
            "all": [event["tokens"] / event["seconds"] for event in rounds],
        },
        "host_us": [event["host_us"] for event in rounds],
        "steps": sum(event["steps"] for event in rounds),
        **acceptance(rounds),
    }
    for profile in outcome.of("profiled", workload):
        entry["profile"] = {key: value for key, value in profile.items() if key not in ("event", "workload")}
        busy = entry["profile"].get("gpu_busy_ms")
        if busy:
            # The profiler slows the host, not the GPU, so this uses the best round's step.
            entry["gpu_idle_share"] = max(0.0, 1 - busy / best)
    return entry


def phases_entry(outcome: Outcome, workload: str) -> dict[str, Any] | None:
    """Return a workload's phases of ``bench --profile``, or None.

    The phases are from the round with the fastest steps, so their sum is a measured step.
    """
    rounds = outcome.of("phases", workload)
    if not rounds:
        return None
    best = min(rounds, key=lambda event: float(event["rows"][0][3]))
    profiles = outcome.of("profiled", workload)
    return {
        "rounds": len(rounds),
        "step_ms": min(1e3 * event["seconds"] / event["steps"] for event in rounds),
        "host_us": best["host_us"],
        **acceptance(rounds),
        "phases": best["rows"],
        "profile": {
            key: value for event in profiles for key, value in event.items() if key not in ("event", "workload")
        },
    }


def telling_line(log_tail: str) -> str:
    """Return the last line of a log that names a cause.

    vLLM's own report about its processes does not count. Without such a line, the last line: libraries log while a
    process ends.
    """
    lines = log_tail.strip().splitlines() or ["no log"]
    named = [line for line in lines if EXCEPTION.search(line)]
    causes = [line for line in named if "See root cause above" not in line]
    return (causes or named or lines)[-1]


def acceptance(events: Sequence[Event]) -> dict[str, Any]:
    """Return the acceptance over all drafts of some measurements."""
    drafts = sum(event["drafts"] for event in events)
    accepted = [sum(column) for column in zip(*(event["accepted_per_position"] for event in events), strict=True)]
    return {
        "drafts": drafts,
        "acceptance_per_position": [count / drafts for count in accepted] if drafts else [],
        "acceptance_length": acceptance_length(drafts, accepted),
    }
