# SPDX-License-Identifier: Apache-2.0
"""The child process of ``bench --profile``: ``python -m vllm_hwplugin_lab.bench._phases_engine JOB ANSWER``.

The engine is in this process, where its objects can be looked at. It waits for commands on its standard input, one line
of JSON each, so that several such processes can take turns:

    {"do": "warm-up" | "round" | "profile", "workload": NAME}, {"do": "end"}

The plugin is not named here: vLLM finds it by its entry points (see ``_entry_points``), as it does for a user.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._answer import Answer
from ._child import engine
from ._engine import generate, subtract
from ._host_speed import host_us
from ._inside import counters, engine_core, model_runner
from ._job import Job, Workload
from ._phases import timed
from ._profile import profiled


class PhasesEngine:
    """One engine, and what can be asked of it."""

    def __init__(self, llm: Any, job: Job, answer: Answer) -> None:
        self._llm, self._job, self._answer = llm, job, answer
        self._workloads = {workload.name: workload for workload in job.workloads}

    def do(self, command: dict[str, Any]) -> None:
        """Do what a command says, and answer it."""
        workload = self._workloads[command["workload"]]
        if command["do"] == "warm-up":
            self._run(workload, workload.warmup_tokens)
            self._answer.say("warm", workload=workload.name)
        elif command["do"] == "round":
            self._answer.say("phases", workload=workload.name, round=command["round"], **self.measure(workload))
        elif command["do"] == "profile":
            self.profile(workload)
        else:
            raise ValueError(f"no such command: {command}")

    def measure(self, workload: Workload) -> dict[str, Any]:
        """One round: the batch as it is, and once more while its functions are timed."""
        speed, before, started = host_us(), counters(self._llm), time.perf_counter()
        self._run(workload, workload.max_tokens)
        seconds, after = time.perf_counter() - started, counters(self._llm)
        with timed(engine_core(self._llm), model_runner(self._llm)) as phases:
            self._run(workload, workload.max_tokens)
        return {
            "host_us": speed,
            "seconds": seconds,
            "steps": after["steps"] - before["steps"],
            "drafts": after["drafts"] - before["drafts"],
            "accepted_per_position": subtract(after["accepted"], before["accepted"]),
            "rows": phases.rows(),
        }

    def profile(self, workload: Workload) -> None:
        """What is launched a step, and how long the GPU works; slows the engine for good."""
        kept = None if workload.trace is None else Path(workload.trace)
        with profiled(model_runner(self._llm), kept) as profile:
            self._run(workload, workload.profile_tokens)
        self._answer.say("collected", workload=workload.name)
        self._answer.say("profiled", workload=workload.name, **profile.counts())

    def _run(self, workload: Workload, tokens: int) -> None:
        generate(self._llm, self._job, workload.prompts[: workload.batch], tokens)


def main(arguments: Sequence[str]) -> None:
    job = Job.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Answer(Path(arguments[1]))
    with engine(job.options, answer) as llm:
        looked_at = PhasesEngine(llm, job, answer)
        while (line := sys.stdin.readline()) and (command := json.loads(line))["do"] != "end":
            looked_at.do(command)


if __name__ == "__main__":
    main(sys.argv[1:])
