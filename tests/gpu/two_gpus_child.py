# SPDX-License-Identifier: Apache-2.0
"""One engine whose workers are processes of their own, and what each did: `python two_gpus_child.py JOB ANSWER`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from vllm_hwplugin_lab.bench._inside import counters

# The likeliest tokens that vLLM gives by default at most.
CHOICES = 20


def sampling(job: dict) -> list:
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=CHOICES if job.get("choices", True) else None,
        )
        for tokens in job["tokens"]
    ]


def said(completions: list) -> dict:
    """The texts, and at each token the likeliest ones, best first."""
    return {
        "texts": [list(completion.token_ids) for completion in completions],
        "choices": [
            [
                sorted(((choice.logprob, token) for token, choice in at.items()), reverse=True)
                for at in one.logprobs or ()
            ]
            for one in completions
        ],
    }


def watch(worker) -> None:
    """Runs in a worker: count from here on."""
    import torch

    from vllm_hwplugin_lab.bench._watch import watched

    worker.worker.hwplugin_watch = watched(worker.worker.model_runner, torch.cuda.CUDAGraph)
    worker.worker.hwplugin_counts = worker.worker.hwplugin_watch.__enter__()


def report(worker) -> dict:
    """Runs in a worker: what was counted, and what the process has in the run record."""
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_hwplugin.base import run_records
    from vllm_hwplugin_lab.bench._inside import drafter_of, graph_modes, platform_class, runner_generation

    runner, entry = worker.worker.model_runner, run_records.current()
    worker.worker.hwplugin_watch.__exit__(None, None, None)
    uses = entry.uses if entry is not None else {}
    return {
        "process": os.getpid(),
        "device": str(worker.worker.device),
        "communicator": type(get_tp_group().device_communicator).__name__,
        "runner": runner_generation(runner),
        "drafts": drafter_of(runner) is not None,
        "platform": platform_class(),
        "graph_modes": graph_modes(runner),
        "decisions": dict(entry.decisions) if entry is not None else {},
        "used": [name for name, use in uses.items() if use["used"]],
        "unused": {name: use["reason"] for name, use in uses.items() if not use["used"]},
        **worker.worker.hwplugin_counts.facts(),
    }


def offline(job: dict) -> dict:
    from vllm import LLM

    llm = LLM(**job["options"])
    llm.collective_rpc(watch)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]

    def answer() -> dict:
        outputs = llm.generate(prompts, sampling_params=sampling(job), use_tqdm=False)
        return said([output.outputs[0] for output in outputs])

    answers = answer()
    if job.get("sleeps"):
        llm.sleep(level=1)
        llm.wake_up()
        answers["awake again"] = answer()
    return {**answers, "workers": llm.collective_rpc(report), **counters(llm)}


def online(job: dict) -> dict:
    """With data parallelism, which `LLM` has not: what `vllm serve` starts, without the HTTP server."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run() -> list:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["options"]))

        async def one(number: int, prompt: list[int], params):
            params.output_kind = RequestOutputKind.FINAL_ONLY
            final = [output async for output in engine.generate({"prompt_token_ids": prompt}, params, f"r{number}")]
            return final[-1].outputs[0]

        try:
            pairs = zip(job["prompts"], sampling(job), strict=True)
            return await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(pairs)))
        finally:
            engine.shutdown()

    return said(asyncio.run(run()))


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    answer = online(given) if given["options"].get("data_parallel_size", 1) > 1 else offline(given)
    Path(sys.argv[2]).write_text(json.dumps({"process": os.getpid(), **answer}))
