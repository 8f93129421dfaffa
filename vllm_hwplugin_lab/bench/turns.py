# SPDX-License-Identifier: Apache-2.0
"""Measure engines that run at the same time in turn: A B A B, in short rounds.

The speed of a shared host changes within a run, so the sides of a comparison must run at almost the same times. For the
same reason the rounds of a batch size are spread over the whole run; a run that ends early has measured every batch
size.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._job import Event, Job, Outcome
from ._launch import Session, TimeIsUp, TimeLimit, ended_by_sigterm

#: Modules of engines' processes: with the engine core in its own process, as for users, or in the same process.
SERVING = "vllm_hwplugin_lab.bench._serving"
ENGINE = "vllm_hwplugin_lab.bench._engine"
#: Seconds that a worker process spins for work.
_SPIN = 1.0
#: Seconds between two looks at a lock that another run holds.
_POLL = 0.1
#: ``stopped`` in the file of an unfinished run.
_GOES_ON = "the run did not come to its end"


@dataclass(frozen=True)
class Measurement:
    """The commands to each side's process (see ``_serving``).

    Attributes:
        name: Name of the workload.
        round: The command of a round; the round's number is added.
        answer: The event that answers it.
        warm_up: The command before the first round, or None.
        profile: The command after the last round, or None. ``collected`` answers it when the engine is idle again, and
            ``profiled`` has the result.
        trial: The command before the first round, in turn, or None; ``tried`` answers it.
        sized: Seconds of the fastest side's trial -> more fields of each round's command.
    """

    name: str
    round: Mapping[str, Any]
    answer: str
    warm_up: Mapping[str, Any] | None
    profile: Mapping[str, Any] | None = None
    trial: Mapping[str, Any] | None = None
    sized: Callable[[float], Mapping[str, Any]] = lambda seconds: {}


def rest_between_turns(device: str | None) -> float:
    """Return the idle seconds between two engines' turns.

    On a CPU vLLM's worker process spins for a second after its last step (`SpinCondition` of
    vllm/distributed/device_communicators/shm_broadcast.py), on cores that the next engine needs.

    Args:
        device: vLLM's device type; None: no engine runs here.
    """
    return _SPIN + 0.1 if device == "cpu" else 0.0


def of_workloads(jobs: Mapping[str, Job], answer: str = "measured") -> list[Measurement]:
    """Return the measurements of all sides' workloads.

    ``answer`` is the event that ends a round.
    """
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


@contextmanager
def turn(file: Path | None, limit: TimeLimit, *, alone: bool) -> Iterator[None]:
    """Hold the lock on ``file``: ``alone``, or together with others that start.

    Raises:
        TimeIsUp: The run has reached its time limit.
    """
    if file is None:
        yield
        return
    with file.open("a") as opened:
        while True:
            try:
                fcntl.flock(opened, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError as taken:
                if not limit.left():
                    raise limit.reached() from taken
                time.sleep(_POLL)
            else:
                break
        yield


def measure_in_turn(
    jobs: Mapping[str, Job],
    measurements: Sequence[Measurement],
    *,
    rounds: int,
    at_once: bool,
    timeout: float,
    limit: TimeLimit | None = None,
    rest: float = 0.0,
    lock: Path | None = None,
    module: str = SERVING,
    on_event: Callable[[Event], None] = lambda event: None,
    keep: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
) -> dict[str, Outcome]:
    """Start an engine per side, measure everything in turn, then profile.

    After a side fails, the remaining sides continue. At the time limit or on Ctrl-C the engines are ended, and the
    results that all sides have are returned; ``stopped`` of the outcomes has the reason.

    Args:
        jobs: Side -> its job.
        rounds: Rounds of each measurement and side.
        at_once: Start the engines at the same time; else one after the other, because they measure free memory.
        timeout: Seconds for a start, and for each answer.
        rest: Seconds between turns, see :func:`rest_between_turns`.
        lock: A file that several runs on one machine name: they start together, and are measured one after the other.
        module: Module of the engines' processes.
    """
    limit = limit or TimeLimit()
    with ended_by_sigterm(), ExitStack() as stack:
        run = _Run(jobs, limit, timeout)
        try:
            with turn(lock, limit, alone=False):
                run.start(stack, module, on_event, at_once=at_once)
                for measurement in measurements:
                    if measurement.warm_up is not None:
                        # All at the same time, because nothing is measured yet: kernels are compiled here.
                        run.tell(measurement.warm_up)
                        run.wait_for("warm")
                run.all_have_the_same()
            with turn(lock, limit, alone=True):
                run.measure(measurements, rounds, rest, keep)
                return run.end()
        except KeyboardInterrupt:
            return run.so_far(run.stopped_by("an interrupt"))
        except TimeIsUp as reason:
            return run.so_far(run.stopped_by(str(reason)))


class _Run:
    """The engines of a run by side, in ``sessions`` once they have started."""

    def __init__(self, jobs: Mapping[str, Job], limit: TimeLimit, timeout: float) -> None:
        self._jobs, self._limit, self._timeout = jobs, limit, timeout
        self.sessions: dict[str, Session] = {}
        self._since = time.monotonic()
        self._start_seconds: float | None = None
        #: Side -> its number of events when all sides had the same rounds; empty before the first round.
        self._same: dict[str, int] = {}
        self._turns = -1

    def start(self, stack: ExitStack, module: str, on_event: Callable[[Event], None], *, at_once: bool) -> None:
        """Start the engines; ``stack`` ends them."""
        for side, job in self._jobs.items():
            self.sessions[side] = stack.enter_context(Session(module, job, on_event, limit=self._limit))
            if not at_once:
                self.sessions[side].wait_for("ready", self._timeout)
        if at_once:
            for session in self.sessions.values():
                session.wait_for("ready", max(self._since + self._timeout - time.monotonic(), 0.0))
        self._start_seconds = time.monotonic() - self._since

    def measure(
        self,
        measurements: Sequence[Measurement],
        rounds: int,
        rest: float,
        keep: Callable[[dict[str, Outcome]], None],
    ) -> None:
        """Run the trials, the rounds, and the profiles."""
        sizes = {}
        for measurement in measurements:
            if measurement.trial is not None:
                self.in_turn(measurement.trial, "tried", rest)
                took = [self.sessions[side].events[-1]["seconds"] for side in self.alive()]
                sizes[measurement.name] = measurement.sized(min(took, default=math.inf))
        for number in range(rounds):
            for measurement in measurements:
                command = {**measurement.round, **sizes.get(measurement.name, {}), "round": number}
                self.in_turn(command, measurement.answer, rest)
                self.all_have_the_same()
            keep(self.so_far(_GOES_ON))
        # Last, because a profiled process launches more slowly for the rest of its life. One engine runs at a time,
        # while the earlier engines read their profiles.
        profiles = [measurement.profile for measurement in measurements if measurement.profile is not None]
        for profile in profiles:
            self.in_turn(profile, "collected")
        if profiles:
            self.wait_for("profiled")

    def tell(self, command: Mapping[str, Any]) -> None:
        for session in self.sessions.values():
            session.tell(command)

    def wait_for(self, event: str) -> None:
        for session in self.sessions.values():
            session.wait_for(event, self._timeout)

    def in_turn(self, command: Mapping[str, Any], answer: str, rest: float = 0.0) -> None:
        """Ask each side that has not failed, one after the other."""
        for session in self.sessions.values():
            if len(self.alive()) > 1:
                time.sleep(min(rest, self._limit.left()))
            session.ask(command, answer, self._timeout)

    def alive(self) -> list[str]:
        """Return the sides that have not failed."""
        return [side for side, session in self.sessions.items() if session.error is None]

    def all_have_the_same(self) -> None:
        """Note that all sides have measured the same rounds."""
        self._same = {side: len(session.events) for side, session in self.sessions.items()}
        self._turns += 1

    def stopped_by(self, reason: str) -> str:
        """Return ``reason``, with the state of the start if nothing was measured."""
        if self._start_seconds is None:
            ready = {
                side
                for side, session in self.sessions.items()
                if any(event["event"] == "ready" for event in session.events)
            }
            missing = ", ".join(side for side in self._jobs if side not in ready)
            seconds = time.monotonic() - self._since
            return f"{reason}, {seconds:.0f} s into the start of the engines ({missing} not ready)"
        if self._turns < 1:
            return f"{reason}, before each side had a round; the engines had started within {self._start_seconds:.0f} s"
        return reason

    def so_far(self, stopped: str) -> dict[str, Outcome]:
        """Return the results so far, with rounds that all sides have.

        A side that has failed keeps its error. Profiles are included. The plugin's decisions are also included, because
        an early end needs them too.
        """
        outcomes = {}
        for side, job in self._jobs.items():
            session = self.sessions.get(side)
            if session is not None and session.error is not None:
                outcomes[side] = dataclasses.replace(self._ended(side), stopped=stopped)
            else:
                events = enumerate(session.events if session is not None else ())
                same = self._same.get(side, math.inf)
                shared = tuple(event for number, event in events if number < same or event["event"] == "profiled")
                records = session.records() if session is not None else ()
                outcomes[side] = Outcome(job, shared, 0.0, records=records, stopped=stopped)
        return outcomes

    def end(self) -> dict[str, Outcome]:
        """Return the results; the engines have ended then."""
        self.tell({"do": "end"})
        for session in self.sessions.values():
            session.wait_for_end()
        return {side: self._ended(side) for side in self._jobs}

    def _ended(self, side: str) -> Outcome:
        ended = self.sessions[side].ended()
        facts = (ended.events, ended.seconds, ended.error, ended.log_tail, ended.records)
        return Outcome(self._jobs[side], *facts, took=ended.took)


def launch(job: Job, *, timeout: float, on_event: Callable[[Event], None] = lambda event: None) -> Outcome:
    """Run a job's rounds; ``timeout`` in seconds per start and round."""
    outcome = measure_in_turn(
        {"": job},
        of_workloads({"": job}),
        rounds=max((workload.rounds for workload in job.workloads), default=0),
        at_once=False,
        timeout=timeout,
        module=ENGINE,
        on_event=on_event,
    )[""]
    if outcome.stopped is not None:
        raise KeyboardInterrupt
    return outcome
