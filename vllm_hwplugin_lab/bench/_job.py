# SPDX-License-Identifier: Apache-2.0
"""What one engine process is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: One line of the child's answer: {"event": "ready" | "measured" | "phases" | "collected" | "profiled" | "done", ...}.
Event = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Prompts, given to the engine in groups of ``batch``, and how they are measured.

    ``profile_tokens`` > 0 adds one run of one group and so many tokens under torch's profiler (CUDA only).
    ``trace`` is where its trace stays.
    ``keep_texts`` returns the generated token ids of the first round.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    batch: int
    rounds: int = 1
    warmup_tokens: int = 0
    profile_tokens: int = 0
    keep_texts: bool = False
    trace: str | None = None


@dataclass(frozen=True)
class Job:
    """One fresh process with one engine: ``options`` are vLLM's ``LLM`` arguments, ``environment`` is set on top."""

    label: str
    patched: bool
    options: dict[str, Any]
    environment: dict[str, str]
    workloads: tuple[Workload, ...]
    tokenize: bool = True

    @property
    def measurements(self) -> int:
        return sum(w.rounds + (w.profile_tokens > 0) for w in self.workloads)


@dataclass(frozen=True)
class Outcome:
    """What came back of a job.

    ``error`` is None when the engine did not fail; what was measured before a crash is kept. ``stopped`` is None when
    all was measured that was to be; else it says what ended the run before that. ``took`` are the lines of vLLM's log
    that say what took how long.
    """

    job: Job
    events: tuple[Event, ...]
    seconds: float
    error: str | None = None
    log_tail: str = ""
    records: tuple[Mapping[str, Any], ...] = field(default=())
    stopped: str | None = None
    took: tuple[str, ...] = ()

    def of(self, event: str, workload: str | None = None) -> list[Event]:
        return [e for e in self.events if e["event"] == event and (workload is None or e["workload"] == workload)]

    def ready(self) -> Event:
        """What the engine said when it stood: seconds, device, versions; empty when it never did."""
        found = self.of("ready")
        return found[0] if found else {}

    def texts(self, workload: str) -> list[list[int]] | None:
        for r in self.of("measured", workload):
            if "texts" in r:
                return [list(t) for t in r["texts"]]
        return None


def acceptance_length(drafts: int, accepted_per_position: Sequence[int]) -> float | None:
    """Mean tokens a verify step yields: the accepted draft tokens and the one that the target always gives."""
    return 1 + sum(accepted_per_position) / drafts if drafts else None
