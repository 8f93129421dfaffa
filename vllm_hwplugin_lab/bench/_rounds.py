# SPDX-License-Identifier: Apache-2.0
"""The rounds of one batch size of one side as one entry of a results file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ._job import Event, Outcome, acceptance_length


def rounds_entry(outcome: Outcome, workload: str) -> dict[str, Any] | None:
    """What was measured of a workload; None when no step of it was.

    A round's speed has two parts: what a step takes, of which the best round counts, because a shared host only makes
    it slower, and what a step yields, of which all rounds together count, because that is chance in each.
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


def acceptance(events: Sequence[Event]) -> dict[str, Any]:
    """Of all that was drafted in some measurements, together."""
    drafts = sum(one["drafts"] for one in events)
    accepted = [sum(column) for column in zip(*(one["accepted_per_position"] for one in events), strict=True)]
    return {
        "drafts": drafts,
        "acceptance_per_position": [count / drafts for count in accepted] if drafts else [],
        "acceptance_length": acceptance_length(drafts, accepted),
    }
