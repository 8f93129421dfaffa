# SPDX-License-Identifier: Apache-2.0
"""The child process with an ``LLM``: ``python -m vllm_hwplugin_lab.bench._engine JOB ANSWER``.

For ``demo``, which compares texts, ``bench --profile`` and ``bench soak``: the engine core runs in this process, which
can access its objects. It follows these commands:

    {"do": "warm-up" | "round" | "phases" | "profile", "workload": NAME, "round": NUMBER}
    {"do": "soak", "workload": NAME, "steps": NUMBER, "seed": NUMBER, "until": SECONDS | null}
    {"do": "judge", "texts": [[PROMPT, TOKENS], ...]}
    {"do": "end"}

vLLM finds the plugin by its entry points (see ``_entry_points``), as for a user.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._child import Answer, commands, engine, host_us, read_job, subtract
from ._inside import counters, engine_core, model_runner
from ._job import Job, Workload
from ._phases import timed
from ._profile import profiled
from ._soak_engine import judge, soak


class Engine:
    """An engine that follows commands."""

    def __init__(self, llm: Any, job: Job, answer: Answer) -> None:
        self._llm, self._job, self._answer = llm, job, answer
        self._workloads = {workload.name: workload for workload in job.workloads}

    def do(self, command: dict[str, Any]) -> None:
        """Run a command, and report its result."""
        name = command["do"]
        if name == "judge":
            self._answer.say("judged", gaps=judge(self._llm, command["texts"]))
            return
        workload = self._workloads[command["workload"]]
        if name == "warm-up":
            self._run(workload, workload.warmup_tokens)
            self._answer.say("warm", workload=workload.name)
        elif name == "profile":
            self._profile(workload)
        elif name == "soak":
            self._answer.say("soaked", **soak(self._llm, command, workload, self._answer))
        elif name in ("round", "phases"):
            facts = {"round": command["round"], "host_us": host_us(), **self._measure(workload, command["round"])}
            if name == "phases":
                # Another run, with timed functions.
                with timed(engine_core(self._llm), model_runner(self._llm)) as phases:
                    self._run(workload, workload.max_tokens)
                facts["rows"] = phases.rows()
            self._answer.say("measured" if name == "round" else name, workload=workload.name, **facts)
        else:
            raise ValueError(f"unknown command {command}")

    def _measure(self, workload: Workload, number: int) -> dict[str, Any]:
        """Run a round: each group of ``batch`` prompts to its end."""
        before, started = counters(self._llm), time.perf_counter()
        texts = [
            text
            for first in range(0, len(workload.prompts), workload.batch)
            for text in self._generate(workload.prompts[first : first + workload.batch], workload.max_tokens)
        ]
        seconds, after = time.perf_counter() - started, counters(self._llm)
        facts: dict[str, Any] = {
            "seconds": seconds,
            "tokens": sum(map(len, texts)),
            "steps": after["steps"] - before["steps"],
            "drafts": after["drafts"] - before["drafts"],
            "accepted_per_position": subtract(after["accepted"], before["accepted"]),
        }
        return {**facts, "texts": texts} if workload.keep_texts and number == 0 else facts

    def _profile(self, workload: Workload) -> None:
        """Count launches per step and GPU time; slows the engine permanently."""
        trace = None if workload.trace is None else Path(workload.trace)
        with profiled(model_runner(self._llm), trace) as profile:
            self._run(workload, workload.profile_tokens)
        self._answer.say("collected", workload=workload.name)
        self._answer.say("profiled", workload=workload.name, **profile.counts())

    def _run(self, workload: Workload, tokens: int) -> None:
        self._generate(workload.prompts[: workload.batch], tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Return greedy answers of all prompts, in one batch."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=self._job.tokenize)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling_params=sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def main(arguments: Sequence[str]) -> None:
    job, answer = read_job(arguments)
    with engine(job.options, answer) as llm:
        measured = Engine(llm, job, answer)
        for command in commands():
            measured.do(command)


if __name__ == "__main__":
    main(sys.argv[1:])
