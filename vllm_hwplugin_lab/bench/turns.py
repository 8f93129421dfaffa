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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ._job import Event, Job, Outcome
from ._launch import Session, TimeIsUp, TimeLimit, ended_by_sigterm

#: Modules of engines' processes: the core in a process of its own, as users have it, or in the engine's.
SERVING = "vllm_hwplugin_lab.bench._serving"
ENGINE = "vllm_hwplugin_lab.bench._engine"
#: Seconds that a worker process looks for work.
_SPIN = 1.0
#: What a run that still goes on says of itself, for the file that it may leave.
_GOES_ON = "the run did not come to its end"


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


def rest_between_turns(device: str | None) -> float:
    """Seconds in which no engine is asked for anything before the next one has its turn.

    On a CPU vLLM has a worker process, which looks for its next step without a pause for a second after its last one
    (`SpinCondition` of vllm/distributed/device_communicators/shm_broadcast.py), on cores that the next engine needs.

    Args:
        device: vLLM's device type; None where no engine runs here.
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
    on_event: Callable[[Event], None] = lambda event: None,
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
    with ended_by_sigterm(), ExitStack() as stack:
        run = _Run(jobs, limit, timeout)
        try:
            run.start(stack, module, on_event, at_once=at_once)
            for one in measurements:
                if one.warm_up is not None:
                    # Nothing is measured yet, so all at the same time: kernels are compiled now.
                    run.tell(one.warm_up)
                    run.wait_for("warm")
            run.all_have_the_same()
            sizes = {}
            for one in measurements:
                if one.trial is not None:
                    run.in_turn(one.trial, "tried", rest)
                    took = [run.sessions[side].events[-1]["seconds"] for side in run.alive()]
                    sizes[one.name] = one.sized(min(took, default=math.inf))
            for number in range(rounds):
                for one in measurements:
                    run.in_turn({**one.round, **sizes.get(one.name, {}), "round": number}, one.answer, rest)
                    run.all_have_the_same()
                keep(run.so_far(_GOES_ON))
            # Last, because a process that was profiled once launches more slowly ever after. One engine runs at a time,
            # while those before it look into what they have collected.
            profiles = [one.profile for one in measurements if one.profile is not None]
            for profile in profiles:
                run.in_turn(profile, "collected")
            if profiles:
                run.wait_for("profiled")
            return run.end()
        except KeyboardInterrupt:
            return run.so_far(run.stopped_by("an interrupt"))
        except TimeIsUp as reason:
            return run.so_far(run.stopped_by(str(reason)))


class _Run:
    """The engines of a run, by side; ``sessions`` fills as they start."""

    def __init__(self, jobs: Mapping[str, Job], limit: TimeLimit, timeout: float) -> None:
        self._jobs, self._limit, self._timeout = jobs, limit, timeout
        self.sessions: dict[str, Session] = {}
        self._since = time.monotonic()
        self._start_seconds: float | None = None
        #: Side -> how many events it had when all had the same rounds; empty before there is a round.
        self._same: dict[str, int] = {}
        self._turns = -1

    def start(self, stack: ExitStack, module: str, on_event: Callable[[Event], None], *, at_once: bool) -> None:
        """Each is ready or failed then; ``stack`` ends them when it is left."""
        for side, job in self._jobs.items():
            self.sessions[side] = stack.enter_context(Session(module, job, on_event, limit=self._limit))
            if not at_once:
                self.sessions[side].wait_for("ready", self._timeout)
        if at_once:
            for session in self.sessions.values():
                session.wait_for("ready", max(self._since + self._timeout - time.monotonic(), 0.0))
        self._start_seconds = time.monotonic() - self._since

    def tell(self, command: Mapping[str, Any]) -> None:
        for session in self.sessions.values():
            session.tell(command)

    def wait_for(self, event: str) -> None:
        for session in self.sessions.values():
            session.wait_for(event, self._timeout)

    def in_turn(self, command: Mapping[str, Any], answer: str, rest: float = 0.0) -> None:
        """Ask each that has not failed, one after the other."""
        for session in self.sessions.values():
            if len(self.alive()) > 1:
                time.sleep(min(rest, self._limit.left()))
            session.ask(command, answer, self._timeout)

    def alive(self) -> list[str]:
        """The sides that have not failed."""
        return [side for side, session in self.sessions.items() if session.error is None]

    def all_have_the_same(self) -> None:
        """What they have said until now is of the same rounds."""
        self._same = {side: len(session.events) for side, session in self.sessions.items()}
        self._turns += 1

    def stopped_by(self, reason: str) -> str:
        """``reason``, and what the start had taken by then, where that is why nothing was measured."""
        if self._start_seconds is None:
            ready = {side for side, one in self.sessions.items() if any(e["event"] == "ready" for e in one.events)}
            missing = ", ".join(side for side in self._jobs if side not in ready)
            seconds = time.monotonic() - self._since
            return f"{reason}, {seconds:.0f} s into the start of the engines ({missing} not ready)"
        if self._turns < 1:
            return f"{reason}, before each side had a round; the engines had started within {self._start_seconds:.0f} s"
        return reason

    def so_far(self, stopped: str) -> dict[str, Outcome]:
        """What came of it until now: of sides that have not failed, the rounds that all of them have, and profiles.

        The plugin's decisions are there as well: a run that is ended early is one of some engine.
        """
        found = {}
        for side, job in self._jobs.items():
            session = self.sessions.get(side)
            if session is not None and session.error is not None:
                found[side] = dataclasses.replace(self._ended(side), stopped=stopped)
            else:
                events = enumerate(session.events if session is not None else ())
                same = self._same.get(side, math.inf)
                kept = tuple(one for number, one in events if number < same or one["event"] == "profiled")
                records = session.records() if session is not None else ()
                found[side] = Outcome(job, kept, 0.0, records=records, stopped=stopped)
        return found

    def end(self) -> dict[str, Outcome]:
        """What came of it; the engines are over then."""
        self.tell({"do": "end"})
        for session in self.sessions.values():
            session.wait_for_end()
        return {side: self._ended(side) for side in self._jobs}

    def _ended(self, side: str) -> Outcome:
        one = self.sessions[side].ended()
        return Outcome(self._jobs[side], one.events, one.seconds, one.error, one.log_tail, one.records, took=one.took)


def launch(job: Job, *, timeout: float, on_event: Callable[[Event], None] = lambda event: None) -> Outcome:
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
