# SPDX-License-Identifier: Apache-2.0
"""A whole probe: child processes until every trial has an answer, and what the answers mean.

A kernel that gets a shape it was not written for may end its process or leave the device unusable. So the trials run in
a child; when it dies, the trial that it was at has crashed, and the next child goes on behind it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_hwplugin.errors import HwpluginError

from ._verdict import Behaviour, Declared, Judged, judge

#: What the child process runs.
MODULE = "vllm_hwplugin_lab.probe._child"
FORMAT = 1


class ProbeError(HwpluginError):
    """The probe could not be made; says why."""


@dataclass(frozen=True)
class Job:
    """What a child is to do.

    ``backends`` are names of vLLM's registry or ``module.Class``; none means those that the platform can use. ``done``
    holds (backend, capability, value) of earlier children's trials. ``patience`` is in seconds for a batch: a kernel
    can run without end, and then only the end of its process ends it.
    """

    backends: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    seed: int = 0
    cases: int = 5
    factor: float = 2.0
    patience: float = 120.0
    done: tuple[tuple[str, str, str], ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        data: dict[str, Any] = json.loads(text)
        data["done"] = tuple(tuple(one) for one in data["done"])
        data |= {name: tuple(data[name]) for name in ("backends", "capabilities")}
        return cls(**data)


@dataclass(frozen=True)
class Result:
    """One trial's answer; ``shape`` is the case that ``detail`` tells of, the worst one where all work."""

    backend: str
    capability: str
    value: str
    declared: Declared
    behaviour: Behaviour
    cases: int
    judged: Judged
    shape: str
    detail: str
    ratio: float | None


@dataclass
class Report:
    """Everything a probe found."""

    job: Job
    host: Mapping[str, Any] = field(default_factory=dict)
    backends: list[Mapping[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.judged.fails]

    def to_dict(self) -> dict[str, Any]:
        """For a results file."""
        settings = {key: value for key, value in dataclasses.asdict(self.job).items() if key != "done"}
        results = [
            {**{k: v for k, v in dataclasses.asdict(one).items() if k != "judged"}, **dataclasses.asdict(one.judged)}
            for one in self.results
        ]
        return {
            "format": FORMAT,
            "ok": not self.failures,
            "settings": settings,
            "host": dict(self.host),
            "backends": [dict(one) for one in self.backends],
            "results": results,
        }


class Ended(Protocol):
    """A child that is over; ``error`` is None when it did all of its job."""

    @property
    def error(self) -> str | None: ...

    @property
    def log_tail(self) -> str: ...


Start = Callable[[Job, Callable[[Mapping[str, Any]], None]], Ended]


def probe(job: Job, start: Start, *, strict: bool, on_result: Callable[[Result], None]) -> Report:
    """Run a job to its end.

    Args:
        job: what to try.
        start: runs a child with a job, and calls back for every event of it.
        strict: what works undeclared fails, whosever backend it is; always so for the plugin's own.
        on_result: called for each trial's answer.

    Raises:
        ProbeError: a child ended outside of any trial.
    """
    report = Report(job)
    while True:
        open_trial: dict[str, Any] = {}

        def on_event(event: Mapping[str, Any], trial: dict[str, Any] = open_trial) -> None:
            kind = event["event"]
            if kind == "host":
                report.host = _body(event)
            elif kind == "backend":
                if event["name"] not in {one["name"] for one in report.backends}:
                    report.backends.append(_body(event))
            elif kind == "trial":
                trial.clear()
                trial.update(_body(event))
            elif kind == "case":
                trial.update(_body(event))
            elif kind == "result":
                trial.clear()
                _add(report, _body(event), strict, on_result)

        ended = start(job, on_event)
        if ended.error is None:
            return report
        if not open_trial:
            raise ProbeError(
                f"the probe's process ended outside of any trial: {ended.error}; it needs vLLM and torch, and "
                f"`vllm-hwplugin doctor` says what is here. End of its log:\n{ended.log_tail}"
            )
        told = ended.log_tail.strip().splitlines()
        crash = {
            "declared": Declared.UNASKED.value,
            "cases": job.cases,
            "shape": "",
            **open_trial,
            "behaviour": Behaviour.CRASHES.value,
            "detail": f"{ended.error}: {told[-1]}" if told else ended.error,
            "ratio": None,
        }
        _add(report, crash, strict, on_result)
        done = (crash["backend"], crash["capability"], crash["value"])
        finished = tuple((one.backend, one.capability, one.value) for one in report.results)
        assert done in finished, "every child has to get further than the one before"
        job = dataclasses.replace(job, done=finished)


def _body(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("event", "pid")}


def _add(report: Report, answer: dict[str, Any], strict: bool, on_result: Callable[[Result], None]) -> None:
    declared, behaviour = Declared(answer.pop("declared")), Behaviour(answer.pop("behaviour"))
    own = any(one["name"] == answer["backend"] and one["own"] for one in report.backends)
    judged = judge(declared, behaviour, strict=strict or own)
    report.results.append(Result(declared=declared, behaviour=behaviour, judged=judged, **answer))
    on_result(report.results[-1])
