# SPDX-License-Identifier: Apache-2.0
"""What ``bench serve`` measures with: a user's own target, drafter and prompts, under a load as clients make it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ._host import Host
from ._job import Outcome
from ._latency import LATENCIES, load_entry, spread
from ._plan import check_sides, possible_sides
from ._prompts import KEYS, Prompt, PromptsUnreadable, arrivals, read_prompts, requests_of
from ._results import processes_entry, provenance, stopped
from ._serve_plan import (
    BUILT_IN,
    METHODS,
    LoadCase,
    ServeSettings,
    kv_cache_size,
    load_cases,
    serve_job,
    serve_measurements,
)

FORMAT = "serve 2"

__all__ = [
    "BUILT_IN",
    "FORMAT",
    "KEYS",
    "LATENCIES",
    "METHODS",
    "LoadCase",
    "Prompt",
    "PromptsUnreadable",
    "ServeSettings",
    "add_serve_case",
    "arrivals",
    "check_sides",
    "kv_cache_size",
    "load_cases",
    "load_entry",
    "new_serve_results",
    "possible_sides",
    "read_prompts",
    "requests_of",
    "serve_job",
    "serve_measurements",
    "spread",
]


def new_serve_results(host: Host, settings: ServeSettings) -> dict[str, Any]:
    """An empty results file."""
    return {
        "format": FORMAT,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "cases": [],
    }


def add_serve_case(results: dict[str, Any], k: int, settings: ServeSettings, sides: Mapping[str, Outcome]) -> None:
    """Put what is measured so far with ``k`` drafted tokens into ``results``, in place of what stood there of it."""
    entry = {
        "k": k,
        "sides": {side: _side(outcome, settings) for side, outcome in sides.items()},
        "stopped": stopped(sides.values()),
    }
    results["cases"] = [*(case for case in results["cases"] if case["k"] != k), entry]


def _side(outcome: Outcome, settings: ServeSettings) -> dict[str, Any]:
    ready = outcome.ready()
    loads = {}
    for case in load_cases(settings):
        found = load_entry(outcome.of("loaded", case.name))
        loads[case.name] = None if found is None else {**dataclasses.asdict(case), **found}
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "start_seconds": ready.get("seconds"),
        "graph_modes": ready.get("graph_modes", {}),
        "model_runner": ready.get("model_runner"),
        "environment": outcome.job.environment,
        "loads": loads,
        "processes": processes_entry(outcome.records),
    }
