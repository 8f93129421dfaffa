# SPDX-License-Identifier: Apache-2.0
"""Engines that are alive at the same time and are measured in turn: A B A B, in short rounds.

The speed of a shared host changes within a run, so the sides of a comparison have to meet the same spells of it. The
rounds of a batch size are spread over the whole run for the same reason, and a run that is ended early has measured all
of it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ._job import Job, Outcome
from ._launch import ended_by_sigterm
from ._session import Session, TimeIsUp, TimeLimit

#: Modules of engines' processes: the core in a process of its own, as users have it, or in the engine's.
SERVING = "vllm_hwplugin_lab.bench._serving"
ENGINE = "vllm_hwplugin_lab.bench._engine"
#: Seconds that a worker process looks for work.
_SPIN = 1.0
#: What a run that still goes on says of itself, for the file that it may leave.
_GOES_ON = "the run did not come to its end"


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


@dataclass(frozen=True)
class Measurement:
    """What every side is asked for in its turns, as commands to its process (see ``_serving``).

    Attributes:
        name: of the workload that is measured.
        round: the command of one round; the round's number is added.
        answer: the event that answers it.
        warm_up: the command before the first round, or None.
        profile: the command after the last round, or None. It is answered by ``collected``, when the engine does
            nothing more, and by ``profiled``, with what was found.
        trial: the command that is answered by ``tried``, before the first round and in turn, or None.
        sized: the seconds that the quickest side's trial took -> what is added to the command of each round.
    """

    name: str
    round: Mapping[str, Any]
    answer: str
    warm_up: Mapping[str, Any] | None
    profile: Mapping[str, Any] | None = None
    trial: Mapping[str, Any] | None = None
    sized: Callable[[float], Mapping[str, Any]] = lambda seconds: {}


def rest_between_turns(device: str) -> float:
    """Seconds in which no engine is asked for anything before the next one has its turn.

    On a CPU vLLM has a worker process, which looks for its next step without a pause for a second after its last one
    (`SpinCondition` of vllm/distributed/device_communicators/shm_broadcast.py), on cores that the next engine needs.

    Args:
        device: vLLM's device type.
    """
    return _SPIN + 0.1 if device == "cpu" else 0.0


def of_workloads(jobs: Mapping[str, Job], answer: str = "measured") -> list[Measurement]:
    """The measurements of the workloads that all sides' jobs have; ``answer`` is the event that ends a round."""
    return [
        Measurement(
            name=workload.name,
            round={"do": "round" if answer == "measured" else answer, "workload": workload.name},
            answer=answer,
            warm_up={"do": "warm-up", "workload": workload.name} if workload.warmup_tokens else None,
            profile={"do": "profile", "workload": workload.name} if workload.profile_tokens else None,
        )
        for workload in next(iter(jobs.values())).workloads
    ]


@dataclass
class _Run:
    """The engines of a run, by side.

    Attributes:
        jobs: side -> what its process is given.
        answers: the events that rounds end with.
        sessions: filled as the engines start.
        since: when the first engine began to start, by ``time.monotonic``.
        start_seconds: how long all of them took for it; None while one has not come to its end.
    """

    jobs: Mapping[str, Job]
    answers: frozenset[str]
    sessions: dict[str, Session] = dataclasses.field(default_factory=dict)
    since: float = dataclasses.field(default_factory=time.monotonic)
    start_seconds: float | None = None

    def start(
        self,
        module: str,
        stack: ExitStack,
        on_event: Callable[[dict[str, Any]], None],
        *,
        limit: TimeLimit,
        at_once: bool,
        timeout: float,
    ) -> None:
        """Start them, each to be ready or failed; ``stack`` ends them when it is left."""
        deadline = self.since + timeout
        for side, job in self.jobs.items():
            self.sessions[side] = stack.enter_context(Session(module, job, on_event, limit=limit))
            if not at_once:
                self.sessions[side].wait_for("ready", timeout)
        if at_once:
            for session in self.sessions.values():
                session.wait_for("ready", max(deadline - time.monotonic(), 0.0))
        self.start_seconds = time.monotonic() - self.since

    def stopped_by(self, reason: str) -> str:
        """``reason``, and what the start had taken by then, where that is why nothing was measured."""
        if self.start_seconds is None:
            seconds = time.monotonic() - self.since
            missing = ", ".join(side for side in self.jobs if not self._stands(side))
            return f"{reason}, {seconds:.0f} s into the start of the engines ({missing} not ready)"
        if not self._common().total():
            return f"{reason}, before each side had a round; the engines had started within {self.start_seconds:.0f} s"
        return reason

    def alive(self) -> list[str]:
        """The sides that have not failed."""
        return [side for side, session in self.sessions.items() if session.error is None]

    def _common(self) -> Counter[str]:
        """The rounds that all sides have that have not failed."""
        return _least(_rounds(self.sessions[side].events, self.answers) for side in self.alive())

    def _stands(self, side: str) -> bool:
        return side in self.sessions and any(one["event"] == "ready" for one in self.sessions[side].events)

    def so_far(self, stopped: str) -> dict[str, Outcome]:
        """What came of it until now: of sides that have not failed, the rounds that all of them have."""
        alive, common, found = self.alive(), self._common(), {}
        for side, job in self.jobs.items():
            if side in alive:
                events = tuple(_first(self.sessions[side].events, common, self.answers))
                found[side] = Outcome(job, events, 0.0, stopped=stopped)
            elif side in self.sessions:
                found[side] = dataclasses.replace(self._ended(side), stopped=stopped)
            else:
                found[side] = Outcome(job, (), 0.0, stopped=stopped)
        return found

    def end(self) -> dict[str, Outcome]:
        """What came of it; the engines are over then."""
        for session in self.sessions.values():
            session.tell({"do": "end"})
        for session in self.sessions.values():
            session.wait_for_end()
        return {side: self._ended(side) for side in self.jobs}

    def _ended(self, side: str) -> Outcome:
        one = self.sessions[side].ended()
        return Outcome(self.jobs[side], one.events, one.seconds, one.error, one.log_tail, one.records)


def measure_in_turn(
    jobs: Mapping[str, Job],
    measurements: Sequence[Measurement],
    *,
    rounds: int,
    at_once: bool,
    timeout: float,
    limit: TimeLimit | None = None,
    rest: float = 0.0,
    module: str = SERVING,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    keep: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
) -> dict[str, Outcome]:
    """Start an engine a side, measure everything in turn, then profile.

    A side that fails is left out from then on; the others go on. Where the time is up, or on Ctrl-C, the engines are
    ended, and what all sides have measured is returned; ``stopped`` of the outcomes says why.

    Args:
        jobs: side -> its engine.
        measurements: what each side is asked for.
        rounds: of each measurement and side.
        at_once: start the engines side by side; else one after the other, for engines that measure free memory then.
        timeout: seconds for a start, and for each answer.
        limit: of the whole.
        rest: seconds between the turns of several sides, see :func:`rest_between_turns`.
        module: of the engines' processes.
        on_event: called with what an engine says.
        keep: called after each round with what would be returned if the run ended there.
    """
    limit = limit or TimeLimit()
    by_name = {one.name: one for one in measurements}
    run = _Run(jobs, frozenset(one.answer for one in measurements))
    with ended_by_sigterm(), ExitStack() as stack:
        try:
            run.start(module, stack, on_event, limit=limit, at_once=at_once, timeout=timeout)
            sessions = run.sessions
            for one in measurements:
                if one.warm_up is not None:
                    # Nothing is measured yet, so all at the same time: kernels are compiled now.
                    for session in sessions.values():
                        session.tell(one.warm_up)
                    for session in sessions.values():
                        session.wait_for("warm", timeout)

            def in_turn(side: str, command: Mapping[str, Any], answer: str) -> None:
                if len(run.alive()) > 1:
                    time.sleep(min(rest, limit.left()))
                sessions[side].ask(command, answer, timeout)

            sizes = {}
            for one in measurements:
                if one.trial is not None:
                    for side in jobs:
                        in_turn(side, one.trial, "tried")
                    took = [sessions[side].events[-1]["seconds"] for side in run.alive()]
                    sizes[one.name] = one.sized(min(took, default=math.inf))
            for turn in turns(rounds, list(by_name), list(jobs)):
                one = by_name[turn.workload]
                command = {**one.round, **sizes.get(one.name, {}), "round": turn.round}
                in_turn(turn.side, command, one.answer)
                if one is measurements[-1] and turn.side == list(jobs)[-1]:
                    keep(run.so_far(_GOES_ON))
            _profile([one.profile for one in measurements if one.profile is not None], sessions, timeout)
            return run.end()
        except KeyboardInterrupt:
            return run.so_far(run.stopped_by("an interrupt"))
        except TimeIsUp as reason:
            return run.so_far(run.stopped_by(str(reason)))


def launch(job: Job, *, timeout: float, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> Outcome:
    """One ``LLM`` alone: every round of all workloads of a job.

    Args:
        job: what to run.
        timeout: seconds for its start, and for each round.
        on_event: called with what it says.
    """
    outcome = measure_in_turn(
        {"": job},
        of_workloads({"": job}),
        rounds=max((one.rounds for one in job.workloads), default=0),
        at_once=False,
        timeout=timeout,
        module=ENGINE,
        on_event=on_event,
    )[""]
    if outcome.stopped is not None:
        raise KeyboardInterrupt
    return outcome


def _profile(commands: Sequence[Mapping[str, Any]], sessions: Mapping[str, Session], timeout: float) -> None:
    """Last, because a process that was profiled once launches more slowly ever after.

    One engine runs at a time, while those before it look into what they have collected.
    """
    for command in commands:
        for session in sessions.values():
            session.ask(command, "collected", timeout)
    for session in sessions.values():
        if commands:
            session.wait_for("profiled", timeout)


def _rounds(events: Iterable[Mapping[str, Any]], answers: frozenset[str]) -> Counter[str]:
    """Of each workload."""
    return Counter(one["workload"] for one in events if one["event"] in answers)


def _least(counts: Iterable[Counter[str]]) -> Counter[str]:
    several = list(counts)
    return Counter({name: min(one[name] for one in several) for one in several for name in one})


def _first(
    events: Iterable[dict[str, Any]], rounds: Mapping[str, int], answers: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """The events without rounds beyond so many of a workload."""
    seen: Counter[str] = Counter()
    for event in events:
        if event["event"] in answers:
            seen[event["workload"]] += 1
            if seen[event["workload"]] > rounds[event["workload"]]:
                continue
        yield event
