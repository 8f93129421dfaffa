# SPDX-License-Identifier: Apache-2.0
"""A probe: run child processes until every trial has a result, and judge the results.

A kernel may end its process or make the device unusable if it gets an unsupported shape. So the trials run in a child
process. If it dies, its current trial has crashed, and another child continues after that trial.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from vllm_hwplugin.base.errors import HwpluginError

from ..bench import Ended, run_child

#: The module that the child process runs.
MODULE: Final = "vllm_hwplugin_lab.probe._child"
FORMAT: Final = 1

#: A backend class's declaration; "unasked": vLLM has no question for it, and gives the layer to the backend anyway.
Declared = Literal["yes", "no", "unasked"]
#: A backend's behaviour in all cases of a trial, worst last. "error" is an exception that is not a refusal: a bug of
#: the backend or of the probe.
Behaviour = Literal["works", "refuses", "wrong", "crashes", "error"]


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def judge(declared: Declared, behaviour: Behaviour, *, strict: bool) -> tuple[str, bool]:
    """Return the verdict, and whether it is a failure.

    Args:
        strict: Whether something that works undeclared is a failure, because the project can correct the declaration.
    """
    if behaviour == "works":
        return ("works-undeclared", strict) if declared == "no" else ("holds", False)
    if behaviour == "refuses":
        return ("refused-though-declared", True) if declared == "yes" else ("refused", False)
    # An error tells nothing about the backend, and a bug of the probe must not look like a refusal.
    if declared == "no" and behaviour != "error":
        # vLLM does not give it such a layer; the verdict is for those who bypass vLLM's checks.
        return f"undeclared, and {behaviour}", False
    return behaviour, True


class ProbeError(HwpluginError):
    """The probe could not run."""


@dataclass(frozen=True)
class Job:
    """A child's job.

    Attributes:
        backends: Names of vLLM's registry or ``module.Class``; empty: all that the platform can use.
        capabilities: Empty: all.
        factor: Allowed error in units of SDPA's.
        patience: Seconds per batch. A kernel can hang, and then only killing its process ends it.
        done: [backend, capability, value] of trials that earlier children have finished.
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
        strict: Whether something that works undeclared fails for any backend; for the plugin's backends it always does.

    Returns:
        The content of the results file. A result has the fields of `_trial.try_out`, and backend, capability, value,
        verdict and ``fails``.

    Raises:
        ProbeError: A child ended outside of a trial.
    """
    settings = dataclasses.asdict(job)
    del settings["done"]
    host: dict[str, Any] = {}
    backends: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    trial: dict[str, Any] = {}  # the child's current trial

    def add(answer: dict[str, Any]) -> None:
        own = any(backend["name"] == answer["backend"] and backend["own"] for backend in backends)
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
        done = [[result["backend"], result["capability"], result["value"]] for result in results]
        asked = dataclasses.replace(job, done=done).to_json()
        ended = run(MODULE, asked, {}, timeout=math.inf, patience=job.patience, on_event=on_event)
        if ended.error is None:
            report = {"settings": settings, "host": host, "backends": backends, "results": results}
            return {"format": FORMAT, "ok": not any(result["fails"] for result in results), **report}
        if not trial:
            raise ProbeError(
                f"the probe's process ended outside of a trial: {ended.error}; it needs vLLM and torch, check "
                f"`vllm-hwplugin doctor`. End of its log:\n{ended.log_tail}"
            )
        detail = ": ".join([ended.error, *ended.log_tail.strip().splitlines()[-1:]])
        defaults = {"declared": "unasked", "cases": job.cases, "shape": ""}
        add({**defaults, **trial, "behaviour": "crashes", "detail": detail, "ratio": None})
