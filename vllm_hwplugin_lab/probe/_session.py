# SPDX-License-Identifier: Apache-2.0
"""A whole probe: child processes until every trial has an answer, and what the answers mean.

A kernel that gets a shape it was not written for may end its process or leave the device unusable. So the trials run in
a child; when it dies, the trial that it was at has crashed, and the next child goes on behind it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from vllm_hwplugin.errors import HwpluginError

from ..bench import Ended, run_child

#: What the child process runs.
MODULE: Final = "vllm_hwplugin_lab.probe._child"
FORMAT: Final = 1

#: What a backend's class says; "unasked" where vLLM has no question for it and hands the layer over anyway.
Declared = Literal["yes", "no", "unasked"]
#: What a backend did on all cases of a trial, the worst last. "error" is an exception that says neither yes nor no: a
#: fault of the backend, or of the probe itself.
Behaviour = Literal["works", "refuses", "wrong", "crashes", "error"]


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def judge(declared: Declared, behaviour: Behaviour, *, strict: bool) -> tuple[str, bool]:
    """The verdict, and whether it is a failure.

    Args:
        strict: something that works and is not declared is a failure: the declaration is ours to correct.
    """
    if behaviour == "works":
        return ("works-undeclared", strict) if declared == "no" else ("holds", False)
    if behaviour == "refuses":
        return ("refused-though-declared", True) if declared == "yes" else ("refused", False)
    # Nobody knows what a backend does that ends in an error, and a probe that fails must not look like a no.
    if declared == "no" and behaviour != "error":
        # vLLM keeps such a layer away; whoever bypasses its checks should know what would happen.
        return f"undeclared, and {behaviour}", False
    return behaviour, True


class ProbeError(HwpluginError):
    """The probe could not be made; says why."""


@dataclass(frozen=True)
class Job:
    """What a child is to do.

    ``backends`` are names of vLLM's registry or ``module.Class``; none means those that the platform can use. ``done``
    holds [backend, capability, value] of earlier children's trials. ``patience`` is in seconds for a batch: a kernel
    can run without end, and then only the end of its process ends it.
    """

    backends: Sequence[str] = ()
    capabilities: Sequence[str] = ()
    seed: int = 0
    cases: int = 5
    factor: float = 2.0
    patience: float = 120.0
    done: Sequence[Sequence[str]] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def probe(
    job: Job,
    *,
    strict: bool = False,
    on_result: Callable[[Mapping[str, Any]], None] = lambda result: None,
    run: Callable[..., Ended] = run_child,
) -> dict[str, Any]:
    """Run a job to its end.

    Args:
        strict: what works undeclared fails, whosever backend it is; always so for the plugin's own.

    Returns:
        What the results file says. A result holds what `_trial.try_out` returns, with backend, capability, value,
        verdict, and whether that ``fails``.

    Raises:
        ProbeError: a child ended outside of any trial.
    """
    settings = dataclasses.asdict(job)
    del settings["done"]
    host: dict[str, Any] = {}
    backends: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    trial: dict[str, Any] = {}  # that a child is at

    def add(answer: dict[str, Any]) -> None:
        own = any(one["name"] == answer["backend"] and one["own"] for one in backends)
        verdict, fails = judge(answer["declared"], answer["behaviour"], strict=strict or own)
        results.append({**answer, "verdict": verdict, "fails": fails})
        trial.clear()
        on_result(results[-1])

    def on_event(event: Mapping[str, Any]) -> None:
        facts = {key: value for key, value in event.items() if key != "event"}
        if event["event"] == "host":
            host.update(facts)
        elif event["event"] == "backend" and facts not in backends:
            backends.append(facts)
        elif event["event"] in ("trial", "case"):
            trial.update(facts)
        elif event["event"] == "result":
            add(facts)

    while True:
        done = [[one["backend"], one["capability"], one["value"]] for one in results]
        asked = dataclasses.replace(job, done=done).to_json()
        ended = run(MODULE, asked, {}, timeout=math.inf, patience=job.patience, on_event=on_event)
        if ended.error is None:
            found = {"settings": settings, "host": host, "backends": backends, "results": results}
            return {"format": FORMAT, "ok": not any(one["fails"] for one in results), **found}
        if not trial:
            raise ProbeError(
                f"the probe's process ended outside of any trial: {ended.error}; it needs vLLM and torch, and "
                f"`vllm-hwplugin doctor` says what is here. End of its log:\n{ended.log_tail}"
            )
        detail = ": ".join([ended.error, *ended.log_tail.strip().splitlines()[-1:]])
        untold = {"declared": "unasked", "cases": job.cases, "shape": ""}
        add({**untold, **trial, "behaviour": "crashes", "detail": detail, "ratio": None})
