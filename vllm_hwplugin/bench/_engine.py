# SPDX-License-Identifier: Apache-2.0
"""The child process: ``python -m vllm_hwplugin.bench._engine JOB ANSWER``.

One engine, all workloads of the job, one JSON line of the answer a measurement, so that a crash keeps what came before.

vLLM finds plugins by their entry points. A source tree that was never installed has none, so ``plugin.register()`` is
called here before the engine is built; where vLLM has loaded the entry point already that call does nothing. It is
enough because VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps the engine in this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._job import Job, Workload


class _Answer:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def say(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


def main(arguments: Sequence[str]) -> None:
    job = Job.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = _Answer(Path(arguments[1]))
    started = time.perf_counter()

    from .. import plugin

    plugin.register()

    import torch
    import vllm
    from vllm import LLM

    llm = LLM(**job.options)
    answer.say(
        "ready",
        seconds=time.perf_counter() - started,
        pid=os.getpid(),
        vllm=vllm.__version__,
        torch=torch.__version__,
        graph_modes=_graph_modes(llm),
    )
    for workload in job.workloads:
        _measure(llm, job, workload, answer)
    # With multiprocessing on, an engine core that is not told outlives this process.
    llm.llm_engine.engine_core.shutdown()
    answer.say("done")


def _measure(llm: Any, job: Job, workload: Workload, answer: _Answer) -> None:
    if workload.warmup_tokens:
        _generate(llm, job, workload.prompts[: workload.batch], workload.warmup_tokens)
    for number in range(workload.rounds):
        before = _counters(llm)
        started = time.perf_counter()
        texts = [
            text
            for first in range(0, len(workload.prompts), workload.batch)
            for text in _generate(llm, job, workload.prompts[first : first + workload.batch], workload.max_tokens)
        ]
        seconds = time.perf_counter() - started
        after = _counters(llm)
        facts: dict[str, Any] = {
            "round": number,
            "seconds": seconds,
            "tokens": sum(map(len, texts)),
            "steps": after["steps"] - before["steps"],
            "drafts": after["drafts"] - before["drafts"],
            "accepted_per_position": _subtract(after["accepted"], before["accepted"]),
        }
        if workload.keep_texts and number == 0:
            facts["texts"] = texts
        answer.say("measured", workload=workload.name, **facts)
    if workload.profile_tokens:
        from ._profile import profiled

        with profiled(_model_runner(llm)) as profile:
            _generate(llm, job, workload.prompts[: workload.batch], workload.profile_tokens)
        answer.say("profiled", workload=workload.name, **profile.counts())


def _generate(llm: Any, job: Job, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=job.tokenize)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling_params=sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def _counters(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": 0, "drafts": 0, "accepted": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:iteration_tokens_total":
            found["steps"] += metric.count  # a histogram that is fed once a scheduler iteration
        elif metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


def _subtract(after: list[int], before: list[int]) -> list[int]:
    return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]


def _model_runner(llm: Any) -> Any:
    """The V1 model runner of an engine in this process; vLLM has no public way to it."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def _graph_modes(llm: Any) -> dict[str, str]:
    """What the target's and the drafter's CUDA graph dispatchers settled on, as vLLM names it."""
    if not hasattr(llm.llm_engine.engine_core, "engine_core"):
        return {}  # the engine core is another process, by the caller's own choice
    runner = _model_runner(llm)
    modes: dict[str, str] = {}
    for name, owner in (("target", runner), ("drafter", getattr(runner, "drafter", None))):
        dispatcher = getattr(owner, "cudagraph_dispatcher", None)
        mode = getattr(dispatcher, "cudagraph_mode", None)
        if getattr(dispatcher, "draft_keys", None) is not None:
            modes[name] = "FULL"  # draft-full-graph keeps its keys beside the dispatcher's own
        elif mode is not None:
            modes[name] = mode.name
    return modes


if __name__ == "__main__":
    main(sys.argv[1:])
