# SPDX-License-Identifier: Apache-2.0
"""The child process of a benchmark that measures as users run.

It is ``python -m vllm_hwplugin_lab.bench._serving JOB ANSWER``.

It runs vLLM's asynchronous engine, as ``vllm serve`` does behind HTTP, with the engine core in a separate process. It
waits for commands on its standard input, one line of JSON each, so that several processes can take turns:

    {"do": "warm-up" | "round" | "profile", "workload": NAME}, {"do": "end"}

vLLM finds the plugin by its entry points (see ``_entry_points``), as it does for a user.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._child import Answer, host_us, read_job, subtract
from ._inside import totals
from ._job import Job, Workload
from ._worker import EXTENSION


@dataclass(frozen=True)
class Moment:
    """``at`` in seconds; ``steps`` and ``tokens`` of the engine so far."""

    at: float
    steps: int
    tokens: int


class Window:
    """The part of a batch in which every request decodes: from the last first token to the first last one.

    Before it the engine prefills; after it the batch is smaller than ``size`` requests. With synthetic acceptance both
    ends differ from run to run.
    """

    def __init__(self, size: int, now: Callable[[], Moment]) -> None:
        self._missing, self._now = size, now
        self._start: Moment | None = None
        self._end: Moment | None = None

    def begun(self) -> None:
        """Note that a request has its first token."""
        self._missing -= 1
        if not self._missing and self._end is None:
            self._start = self._now()

    def finished(self) -> None:
        """Note that a request has its last token."""
        if self._end is None:
            self._end = self._now()

    def facts(self) -> dict[str, float]:
        """Return the window's sums; zeros if a request ended before another began."""
        if self._start is None or self._end is None:
            return {"seconds": 0.0, "steps": 0, "tokens": 0}
        return {
            "seconds": self._end.at - self._start.at,
            "steps": self._end.steps - self._start.steps,
            "tokens": self._end.tokens - self._start.tokens,
        }


def added(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the facts of several windows."""
    return {name: sum(window[name] for window in windows) for name in ("seconds", "steps", "tokens")}


class Serving:
    """One engine, and the commands that it follows."""

    def __init__(self, engine: Any, job: Job, answer: Answer) -> None:
        self._engine, self._job, self._answer = engine, job, answer
        self._workloads = {workload.name: workload for workload in job.workloads}
        self._asked = 0

    async def measure(self, workload: Workload, number: int) -> dict[str, Any]:
        """Run one round: each group of ``batch`` prompts until all have ended."""
        speed, before, windows = host_us(), _totals(), []
        for first in range(0, len(workload.prompts), workload.batch):
            prompts = workload.prompts[first : first + workload.batch]
            windows.append(await self._batch(workload, prompts, workload.max_tokens))
        after = _totals()
        return {
            "round": number,
            "host_us": speed,
            **added(windows),
            "drafts": after["drafts"] - before["drafts"],
            "accepted_per_position": subtract(after["accepted"], before["accepted"]),
        }

    async def profile(self, workload: Workload) -> None:
        """Profile launches and GPU time per step; the engine stays slower afterwards."""
        await self.ask_worker("hwplugin_start_profile")
        await self._batch(workload, workload.prompts[: workload.batch], workload.profile_tokens)
        await self.ask_worker("hwplugin_stop_profile")
        self._answer.say("collected", workload=workload.name)
        counts = await self.ask_worker("hwplugin_profile_counts")
        self._answer.say("profiled", workload=workload.name, **counts)

    async def do(self, command: dict[str, Any]) -> None:
        """Run a command and write its answer."""
        action = command["do"]
        workload = self._workloads[command["workload"]]
        if action == "warm-up":
            await self._batch(workload, workload.prompts[: workload.batch], workload.warmup_tokens)
            self._answer.say("warm", workload=workload.name)
        elif action == "round":
            self._answer.say("measured", workload=workload.name, **await self.measure(workload, command["round"]))
        elif action == "profile":
            await self.profile(workload)
        else:
            raise ValueError(f"no such command: {command}")

    async def ask_worker(self, method: str, *arguments: Any) -> Any:
        first, *_ = await self._engine.collective_rpc(method, args=arguments)
        return first

    async def _batch(self, workload: Workload, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        window = Window(len(prompts), _now)
        await asyncio.gather(*(self._request(prompt, tokens, window) for prompt in prompts))
        return window.facts()

    async def _request(self, prompt: Sequence[int], tokens: int, window: Window) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=self._job.tokenize,
            output_kind=RequestOutputKind.DELTA,
        )
        self._asked += 1
        begun = False
        async for output in self._engine.generate({"prompt_token_ids": list(prompt)}, sampling, str(self._asked)):
            if not begun and output.outputs[0].token_ids:
                begun = True
                window.begun()
        window.finished()


def _totals() -> dict[str, Any]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return totals(get_metrics_snapshot())


def _now() -> Moment:
    at, counts = time.perf_counter(), _totals()
    return Moment(at, counts["steps"], counts["tokens"])


async def async_engine(options: Mapping[str, Any]) -> Any:
    """Start vLLM's asynchronous engine with `BenchWorker` in its workers."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    from vllm.usage.usage_lib import UsageContext

    arguments = AsyncEngineArgs(**{"worker_extension_cls": EXTENSION, **options})
    # The usage context of vLLM's server: it decides some defaults.
    return AsyncLLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)


async def serve(job: Job, answer: Answer) -> None:
    """Start the job's engine and run commands until the last one."""
    started = time.perf_counter()
    engine = await async_engine(job.options)
    try:
        serving = Serving(engine, job, answer)
        facts = await serving.ask_worker("hwplugin_facts")
        answer.say("ready", seconds=time.perf_counter() - started, pid=os.getpid(), **facts)
        while (line := await asyncio.to_thread(sys.stdin.readline)) and (command := json.loads(line))["do"] != "end":
            await serving.do(command)
    finally:
        # The engine core outlives this process unless it is shut down.
        engine.shutdown()
    answer.say("done")


def main(arguments: Sequence[str]) -> None:
    asyncio.run(serve(*read_job(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
