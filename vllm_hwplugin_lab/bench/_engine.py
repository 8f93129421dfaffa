# SPDX-License-Identifier: Apache-2.0
"""The child process with an ``LLM``: ``python -m vllm_hwplugin_lab.bench._engine JOB ANSWER``.

For ``demo``, which compares texts, for ``bench --profile``, and for ``bench soak``: with the engine's core in this
process, its objects can be looked at. It follows these commands:

    {"do": "warm-up" | "round" | "phases" | "profile", "workload": NAME, "round": NUMBER}
    {"do": "soak", "workload": NAME, "steps": NUMBER, "seed": NUMBER, "until": SECONDS | null}
    {"do": "judge", "texts": [[PROMPT, TOKENS], ...]}
    {"do": "end"}

The plugin is not named here: vLLM finds it by its entry points (see ``_entry_points``), as it does for a user.
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
    """One engine, and what can be asked of it."""

    def __init__(self, llm: Any, job: Job, answer: Answer) -> None:
        self._llm, self._job, self._answer = llm, job, answer
        self._workloads = {workload.name: workload for workload in job.workloads}

    def do(self, command: dict[str, Any]) -> None:
        """Do what a command says, and answer it."""
        what = command["do"]
        if what == "judge":
            self._answer.say("judged", gaps=judge(self._llm, command["texts"]))
            return
        workload = self._workloads[command["workload"]]
        if what == "warm-up":
            self._run(workload, workload.warmup_tokens)
            self._answer.say("warm", workload=workload.name)
        elif what == "profile":
            self._profile(workload)
        elif what == "soak":
            self._answer.say("soaked", **soak(self._llm, command, workload, self._answer))
        elif what in ("round", "phases"):
            facts = {"round": command["round"], "host_us": host_us(), **self._measure(workload, command["round"])}
            if what == "phases":
                # Once more while its functions are timed.
                with timed(engine_core(self._llm), model_runner(self._llm)) as phases:
                    self._run(workload, workload.max_tokens)
                facts["rows"] = phases.rows()
            self._answer.say("measured" if what == "round" else what, workload=workload.name, **facts)
        else:
            raise ValueError(f"no such command: {command}")

    def _measure(self, workload: Workload, number: int) -> dict[str, Any]:
        """One round: each group of ``batch`` prompts until all its requests have ended."""
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
        """What is launched a step, and how long the GPU works; slows the engine for good."""
        kept = None if workload.trace is None else Path(workload.trace)
        with profiled(model_runner(self._llm), kept) as profile:
            self._run(workload, workload.profile_tokens)
        self._answer.say("collected", workload=workload.name)
        self._answer.say("profiled", workload=workload.name, **profile.counts())

    def _run(self, workload: Workload, tokens: int) -> None:
        self._generate(workload.prompts[: workload.batch], tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of so many tokens, all prompts at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=self._job.tokenize)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, sampling_params=sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def main(arguments: Sequence[str]) -> None:
    job, answer = read_job(arguments)
    with engine(job.options, answer) as llm:
        asked = Engine(llm, job, answer)
        for command in commands():
            asked.do(command)


if __name__ == "__main__":
    main(sys.argv[1:])
