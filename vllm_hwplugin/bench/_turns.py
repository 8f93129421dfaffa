# SPDX-License-Identifier: Apache-2.0
"""Engines that are alive at the same time and are measured in turn: A B A B, in short rounds.

The speed of a shared host changes within a run, so the sides of a comparison have to meet the same spells of it. The
rounds of a batch size are spread over the whole run for the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ._job import Event, Job, Outcome
from ._launch import Child, Ended, ended_by_sigterm

MODULE = "vllm_hwplugin.bench._serving"
#: Seconds that an engine may take to end.
_END = 60.0


@dataclass(frozen=True)
class Turn:
    """One side's one measurement of one workload."""

    round: int
    workload: str
    side: str


def turns(rounds: int, workloads: Sequence[str], sides: Sequence[str]) -> Iterator[Turn]:
    """Every round of every workload of every side: the sides in turn, and a workload again when all had theirs."""
    for number in range(rounds):
        for workload in workloads:
            for side in sides:
                yield Turn(number, workload, side)


class Session:
    """A side's engine, from its start to its end; what it is asked after it failed is not done."""

    def __init__(self, job: Job, on_event: Callable[[Event], None]) -> None:
        self.job, self._on_event = job, on_event
        self.error: str | None = None
        self._ended: Ended | None = None
        self._child = Child(MODULE, job.to_json(), job.environment, commands=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__()

    def wait_for(self, event: str, timeout: float) -> bool:
        """Whether the engine says ``event`` within ``timeout`` seconds; if not, it has failed."""
        if self.error is not None:
            return False
        in_time = self._child.follow(timeout, until=lambda one: one["event"] == event, on_event=self._on_event)
        if not in_time:
            self.error = f"no answer {event!r} after {timeout:.0f} s; killed"
            # At once: it would go on beside the sides that are still measured.
            self._ended = self._child.end(self.error)
        elif [one["event"] for one in self._child.events[-1:]] != [event]:
            self.error = ""  # the process is over, and its exit says why
        return self.error is None

    def tell(self, command: Mapping[str, Any]) -> None:
        """Give a command whose answer is waited for later."""
        if self.error is None:
            self._child.tell(command)

    def ask(self, command: Mapping[str, Any], answer: str, timeout: float) -> bool:
        """Give a command and wait for its answer."""
        self.tell(command)
        return self.wait_for(answer, timeout)

    def wait_for_end(self) -> None:
        """See the process go that was told to end."""
        if self.wait_for("done", _END):
            self._child.follow(_END, until=lambda one: False)

    def outcome(self) -> Outcome:
        """What came of it; the process is over then."""
        ended = self._ended or self._child.end(self.error)
        return Outcome(self.job, ended.events, ended.seconds, ended.error, ended.log_tail, ended.records)

    def so_far(self) -> Outcome:
        """What came of it until now."""
        return Outcome(self.job, tuple(self._child.events), 0.0)


def started(
    jobs: Mapping[str, Job], stack: ExitStack, *, at_once: bool, timeout: float, on_event: Callable[[Event], None]
) -> dict[str, Session]:
    """The engines of all sides, each ready or failed.

    Args:
        jobs: side -> its engine.
        stack: ends them when it is left.
        at_once: start them side by side; else one after the other, for engines that measure free memory at their start.
        timeout: seconds for one start.
        on_event: called with what an engine says.
    """
    sessions: dict[str, Session] = {}
    deadline = time.monotonic() + timeout
    for side, job in jobs.items():
        sessions[side] = stack.enter_context(Session(job, on_event))
        if not at_once:
            sessions[side].wait_for("ready", timeout)
    if at_once:
        for session in sessions.values():
            session.wait_for("ready", max(deadline - time.monotonic(), 0.0))
    return sessions


@dataclass(frozen=True)
class Measurement:
    """What every side is asked for in its turns, as commands to its process (see ``_serving``).

    Attributes:
        name: of the workload that is measured.
        round: the command of one round; the round's number is added.
        answer: the event that answers it.
        warm_up: the command before the first round, or None.
        profile: the command after the last round, or None.
    """

    name: str
    round: Mapping[str, Any]
    answer: str
    warm_up: Mapping[str, Any] | None
    profile: Mapping[str, Any] | None


def of_workloads(jobs: Mapping[str, Job]) -> list[Measurement]:
    """The measurements of the workloads that all sides' jobs have."""
    return [
        Measurement(
            name=workload.name,
            round={"do": "round", "workload": workload.name},
            answer="measured",
            warm_up={"do": "warm-up", "workload": workload.name} if workload.warmup_tokens else None,
            profile={"do": "profile", "workload": workload.name} if workload.profile_tokens else None,
        )
        for workload in next(iter(jobs.values())).workloads
    ]


def measure_in_turn(
    jobs: Mapping[str, Job],
    measurements: Sequence[Measurement],
    *,
    rounds: int,
    at_once: bool,
    timeout: float,
    on_event: Callable[[Event], None] = lambda event: None,
    keep: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
) -> dict[str, Outcome]:
    """Start an engine a side, measure everything in turn, then profile.

    A side that fails is left out from then on; the others go on.

    Args:
        jobs: side -> its engine.
        measurements: what each side is asked for.
        rounds: of each measurement and side.
        at_once: start the engines side by side.
        timeout: seconds for a start, and for each answer.
        on_event: called with what an engine says.
        keep: called after each round with what would be returned if the run ended there.
    """
    sides, by_name = list(jobs), {one.name: one for one in measurements}
    with ended_by_sigterm(), ExitStack() as stack:
        sessions = started(jobs, stack, at_once=at_once, timeout=timeout, on_event=on_event)
        for one in measurements:
            if one.warm_up is not None:
                # Nothing is measured yet, so all at the same time: kernels are compiled now.
                for session in sessions.values():
                    session.tell(one.warm_up)
                for session in sessions.values():
                    session.wait_for("warm", timeout)
        for turn in turns(rounds, list(by_name), sides):
            one = by_name[turn.workload]
            sessions[turn.side].ask({**one.round, "round": turn.round}, one.answer, timeout)
            if turn.workload == measurements[-1].name and turn.side == sides[-1]:
                keep({side: session.so_far() for side, session in sessions.items()})
        # Last, because a process that was profiled once launches more slowly ever after.
        for one in measurements:
            for session in sessions.values():
                if one.profile is not None:
                    session.ask(one.profile, "profiled", timeout)
        for session in sessions.values():
            session.tell({"do": "end"})
        for session in sessions.values():
            session.wait_for_end()
        return {side: session.outcome() for side, session in sessions.items()}
