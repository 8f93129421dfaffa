# SPDX-License-Identifier: Apache-2.0
"""The child process: ``python -m vllm_hwplugin_lab.bench._engine JOB ANSWER``.

One engine, all workloads of the job, one JSON line of the answer a measurement, so that a crash keeps what came before.

The plugin is not named here: vLLM finds it by its entry points (see ``_entry_points``), as it does for a user.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._answer import Answer
from ._child import engine
from ._inside import counters
from ._job import Job, Workload


def main(arguments: Sequence[str]) -> None:
    job = Job.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Answer(Path(arguments[1]))
    with engine(job.options, answer) as llm:
        for workload in job.workloads:
            _measure(llm, job, workload, answer)


def _measure(llm: Any, job: Job, workload: Workload, answer: Answer) -> None:
    if workload.warmup_tokens:
        generate(llm, job, workload.prompts[: workload.batch], workload.warmup_tokens)
    for number in range(workload.rounds):
        before = counters(llm)
        started = time.perf_counter()
        texts = [
            text
            for first in range(0, len(workload.prompts), workload.batch)
            for text in generate(llm, job, workload.prompts[first : first + workload.batch], workload.max_tokens)
        ]
        seconds = time.perf_counter() - started
        after = counters(llm)
        facts: dict[str, Any] = {
            "round": number,
            "seconds": seconds,
            "tokens": sum(map(len, texts)),
            "steps": after["steps"] - before["steps"],
            "drafts": after["drafts"] - before["drafts"],
            "accepted_per_position": subtract(after["accepted"], before["accepted"]),
        }
        if workload.keep_texts and number == 0:
            facts["texts"] = texts
        answer.say("measured", workload=workload.name, **facts)


def generate(llm: Any, job: Job, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy answers of so many tokens, all prompts at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=job.tokenize)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling_params=sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def subtract(after: list[int], before: list[int]) -> list[int]:
    """What was counted between two times, by position; ``before`` may be empty, when nothing had been drafted."""
    return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
