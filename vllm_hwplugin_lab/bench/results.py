# SPDX-License-Identifier: Apache-2.0
"""Results files: JSON, written anew after every round, so that an interrupted run keeps its part."""

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
#: Of the files of ``bench --profile``.
PHASES_FORMAT = "phases 2"
#: Of a line, less what closes what is open at its end.
_WIDTH = 110
_DIGITS = 11
#: So many objects make a table.
_TABLE = 8


def commit() -> str | None:
    """The source tree's commit, with ``+`` when it has local changes; None for an installed wheel.

    ``HWPLUGIN_BENCH_COMMIT`` outweighs git: a copy of a tree on a measuring host may lie in some other repository.
    """
    if named := os.environ.get("HWPLUGIN_BENCH_COMMIT"):
        return named
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    # Twelve digits of what HEAD is, whatever tags there are.
    command = ["git", "-C", str(home), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or an unborn branch: the figures stand without it


def provenance() -> dict[str, str | None]:
    """When a results file was made, and by what: the entries that every such file has."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": commit(),
    }


def new_results(form: Any, host: Host, settings: Asked) -> dict[str, Any]:
    """An empty results file of a format."""
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
    """Put what was measured so far of a case into ``results``, in place of what stood there of it.

    Args:
        results: the file's.
        key: what tells the case from others.
        sides: side -> what came of it.
        entry: what the file has of a side.
        more: what stands beside.
    """
    kept = [one for one in results["cases"] if any(one[name] != value for name, value in key.items())]
    entries = {side: entry(outcome) for side, outcome in sides.items()}
    results["cases"] = [*kept, {**key, **more, "sides": entries, "stopped": stopped(sides.values())}]


def add_case(results: dict[str, Any], case: Case, settings: Asked, sides: Mapping[str, Outcome]) -> None:
    """As :func:`put_case`, of ``bench``."""
    length = synthetic_length(case, settings.acceptance_length)
    put_case(results, dataclasses.asdict(case), sides, _side, synthetic_acceptance_length=length)


def add_phases(results: dict[str, Any], case: Case, sides: Mapping[str, Outcome]) -> None:
    """As :func:`put_case`, of ``bench --profile``: in ``cases`` what failed, in ``engines`` an entry a batch size."""
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
    kept = [one for one in results.get("engines", ()) if {name: one[name] for name in key} != key]
    results["engines"] = [
        *kept,
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
    """The features that an engine's processes use, by their records."""
    return sorted({name for one in records for name, use in one["uses"].items() if use["used"]})


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
        "processes": processes_entry(outcome.records),
    }


def processes_entry(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the records of an engine's processes say, each thing once; what none of them says is left out.

    Which modules were patched follows from the fingerprint, and why a feature is off from the settings and the commit.
    """
    records = list(records)
    said: dict[str, dict[str, str]] = {"live": {}, "refused": {}, "used": {}}
    decided: dict[str, dict[str, list[str]]] = {}
    for one in records:
        for feature, told in one["features"].items():
            if told["state"] in said:
                said[told["state"]][feature] = told["reason"]
        said["used"] |= {feature: told["reason"] for feature, told in one["uses"].items() if told["used"]}
        for name, text in one["decisions"].items():
            decided.setdefault(name, {}).setdefault(one["role"], []).append(text)
    found = {
        "roles": [one["role"] for one in records],
        "fingerprints": list(dict.fromkeys(one["fingerprint"] for one in records if one["fingerprint"])),
        "live": sorted(said["live"]),
        "refused": said["refused"],
        "used": said["used"],
        # A worker decides after its parents; workers of one engine may decide differently, which is worth seeing.
        "decisions": {name: " | ".join(dict.fromkeys([*by_role.values()][-1])) for name, by_role in decided.items()},
        "notes": list(dict.fromkeys(note for one in records for note in one["notes"])),
        "errors": list(dict.fromkeys(one["error"] for one in records if one["error"])),
    }
    return {name: told for name, told in found.items() if told}


def results_text(results: Mapping[str, Any], *, tables: bool = True) -> str:
    """JSON as results are kept in git: filled lines, and `_DIGITS` significant digits.

    Args:
        results: of a benchmark.
        tables: write a long list of like objects as one object of ``columns`` and ``rows``; what an object lacks that
            the others have is null there. Else a reader needs not know of it.
    """
    return _filled(_compact(results, tables=tables)) + "\n"


def read_results(text: str) -> Any:
    """What :func:`results_text` was given.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(text, object_hook=_objects)


def _compact(value: Any, *, tables: bool) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _compact(one, tables=tables) for key, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    found = [_compact(one, tables=tables) for one in value]
    if tables and len(found) >= _TABLE and all(isinstance(one, dict) for one in found):
        columns = max((list(one) for one in found), key=len)
        plain = not any(isinstance(held, (dict, list)) for one in found for held in one.values())
        if plain and all(set(one) <= set(columns) for one in found):
            return {"columns": columns, "rows": [[one.get(key) for key in columns] for one in found]}
    return found


def _objects(found: dict[str, Any]) -> Any:
    if found.keys() != {"columns", "rows"}:
        return found
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def _filled(value: Any, depth: int = 0, before: int = 0) -> str:
    """A value in lines, behind so many columns ``before`` it in its first one."""
    whole = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or depth + before + len(whole) < _WIDTH:
        return whole
    if isinstance(value, dict):
        keys = {key: f"{json.dumps(str(key))}: " for key in value}
        items = [f"{keys[key]}{_filled(one, depth + 1, len(keys[key]))}" for key, one in value.items()]
    else:
        items = [_filled(one, depth + 1) for one in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = [""]
    for item in items:
        full = depth + (before if len(lines) == 1 else 0) + len(lines[-1]) + len(item) > _WIDTH
        if lines[-1] and (full or "\n" in item or "\n" in lines[-1]):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return begin + ("\n" + " " * (depth + 1)).join(lines)[:-1] + end


def rounds_entry(outcome: Outcome, workload: str) -> dict[str, Any] | None:
    """What was measured of a workload; None when no step of it was.

    Time per step: the best round, because a shared host only adds time. Tokens per step: all rounds together, because
    they are random.
    """
    rounds = [one for one in outcome.of("measured", workload) if one["steps"]]
    if not rounds:
        return None
    steps = [1e3 * one["seconds"] / one["steps"] for one in rounds]
    best, median = min(steps), statistics.median(steps)
    tokens = sum(one["tokens"] for one in rounds) / sum(one["steps"] for one in rounds)
    entry: dict[str, Any] = {
        "rounds": len(rounds),
        "step_ms": {"best": best, "median": median, "all": steps},
        "tokens_per_step": tokens,
        "tokens_per_second": {
            "best": 1e3 * tokens / best,
            "median": 1e3 * tokens / median,
            "all": [one["tokens"] / one["seconds"] for one in rounds],
        },
        "host_us": [one["host_us"] for one in rounds],
        "steps": sum(one["steps"] for one in rounds),
        **acceptance(rounds),
    }
    for profile in outcome.of("profiled", workload):
        entry["profile"] = {key: value for key, value in profile.items() if key not in ("event", "workload")}
        busy = entry["profile"].get("gpu_busy_ms")
        if busy:
            # The profiler slows the host, not the GPU: the step is that of the best round.
            entry["gpu_idle_share"] = max(0.0, 1 - busy / best)
    return entry


def phases_entry(outcome: Outcome, workload: str) -> dict[str, Any] | None:
    """What ``bench --profile`` found of a workload; None when nothing was.

    The phases are those of the round whose steps were the quickest, so what they sum up to is one step that there was.
    """
    rounds = outcome.of("phases", workload)
    if not rounds:
        return None
    best = min(rounds, key=lambda one: float(one["rows"][0][3]))
    profiles = outcome.of("profiled", workload)
    return {
        "rounds": len(rounds),
        "step_ms": min(1e3 * one["seconds"] / one["steps"] for one in rounds),
        "host_us": best["host_us"],
        **acceptance(rounds),
        "phases": best["rows"],
        "profile": {key: value for one in profiles for key, value in one.items() if key not in ("event", "workload")},
    }


def telling_line(log_tail: str) -> str:
    """The last line that names an exception, but vLLM's of what its processes have raised, else the last line:
    libraries go on talking while a process ends.
    """
    lines = log_tail.strip().splitlines() or ["no log"]
    named = [line for line in lines if EXCEPTION.search(line)]
    causes = [line for line in named if "See root cause above" not in line]
    return (causes or named or lines)[-1]


def acceptance(events: Sequence[Event]) -> dict[str, Any]:
    """Of all that was drafted in some measurements, together."""
    drafts = sum(one["drafts"] for one in events)
    accepted = [sum(column) for column in zip(*(one["accepted_per_position"] for one in events), strict=True)]
    return {
        "drafts": drafts,
        "acceptance_per_position": [count / drafts for count in accepted] if drafts else [],
        "acceptance_length": acceptance_length(drafts, accepted),
    }
