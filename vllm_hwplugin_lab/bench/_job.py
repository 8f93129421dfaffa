# SPDX-License-Identifier: Apache-2.0
"""An engine process's job, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A line of the child's answer: {"event": "ready" | "measured" | "phases" | "collected" | "profiled" | "done", ...}.
Event = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Prompts, sent to the engine in groups of ``batch``, and their measurement.

    Attributes:
        profile_tokens: > 0: profile one more run of a group with this many tokens (CUDA only).
        trace: The profile's file.
        keep_texts: Return the generated token ids of the first round.
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
    """A fresh process with an engine.

    Attributes:
        options: Arguments of vLLM's ``LLM``.
        environment: Variables on top of the caller's.
    """

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
    """The result of a job.

    Attributes:
        events: The measurements, including those before a crash.
        error: None: the engine did not fail.
        stopped: Why the run ended early; None: everything was measured.
        took: Lines of vLLM's log about times and memory.
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
        """Return the engine's `ready` event; empty: it never was ready."""
        events = self.of("ready")
        return events[0] if events else {}

    def texts(self, workload: str) -> list[list[int]] | None:
        for r in self.of("measured", workload):
            if "texts" in r:
                return [list(t) for t in r["texts"]]
        return None


def acceptance_length(drafts: int, accepted_per_position: Sequence[int]) -> float | None:
    """Return the mean tokens of a verify step.

    They are the accepted draft tokens and the target's token.
    """
    return 1 + sum(accepted_per_position) / drafts if drafts else None
