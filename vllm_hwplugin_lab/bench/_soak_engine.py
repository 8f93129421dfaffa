# SPDX-License-Identifier: Apache-2.0
"""The child process of a soak: ``python -m vllm_hwplugin_lab.bench._soak_engine JOB ANSWER``.

Either it runs the load (steps > 0), or it judges texts, which it waits for on its standard input: {"texts": [[PROMPT,
TOKENS], ...]}. An engine without speculation reads each text once and says how far below its own first choice every
token was. A greedy text has no such token; in bfloat16 a near-tie may go either way with the shape of the batch, and
its gap is small.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._child import Answer, engine
from ._inside import counters, model_runner
from ._load import Request, requests, wanted
from ._watch import watched
from .soak import SoakJob, Text

_PROGRESS_SECONDS = 1.0


def main(arguments: Sequence[str]) -> None:
    job = SoakJob.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Answer(Path(arguments[1]))
    with engine(job.options, answer) as llm:
        if job.steps:
            answer.say("soaked", **soak(llm, job, answer))
        elif line := sys.stdin.readline():
            texts = [Text(tuple(prompt), tuple(tokens)) for prompt, tokens in json.loads(line).get("texts", ())]
            answer.say("judged", gaps=judge(llm, texts))


def soak(llm: Any, job: SoakJob, answer: Answer) -> dict[str, Any]:
    """Keep the engine under the job's load for its steps, then let the requests that are in it end."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, running = llm.llm_engine, 0
    texts: list[tuple[int, list[int], list[int]]] = []
    coming, sizes = requests(job.pool, job.seed, job.options["max_model_len"]), wanted(job.seed, job.max_num_seqs)
    asked: list[Request] = []
    started = said = time.perf_counter()
    runner = model_runner(llm)
    graphs = None if getattr(runner, "device", torch.device("cpu")).type == "cpu" else torch.cuda.CUDAGraph
    with watched(runner, graphs) as counts:

        def goes_on() -> bool:
            return counts.steps < job.steps and (job.until is None or time.time() < job.until)

        while running or goes_on():
            size = next(sizes) if goes_on() else 0
            while running < size:
                asked.append(next(coming))
                sampling = SamplingParams(
                    temperature=0.0,
                    max_tokens=asked[-1].max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt = {"prompt_token_ids": list(asked[-1].prompt)}
                engine.add_request(str(len(asked) - 1), prompt, sampling)
                running += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    number = int(output.request_id)
                    texts.append((number, list(asked[number].prompt), list(output.outputs[0].token_ids)))
            if time.perf_counter() - said > _PROGRESS_SECONDS:
                said = time.perf_counter()
                answer.say("progress", steps=counts.steps)
    found = counters(llm)
    return {
        "seconds": time.perf_counter() - started,
        "requests": len(asked),
        "tokens": sum(len(text) for _, _, text in texts),
        "drafts": found["drafts"],
        "accepted_per_position": found["accepted"],
        **counts.facts(),
        "texts": sorted(texts),
    }


def judge(llm: Any, texts: Sequence[Text]) -> list[list[float]]:
    """For each text, how far each of its tokens is below the first choice, in nats."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    whole = [[*text.prompt, *text.tokens] for text in texts]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in whole], sampling_params=sampling, use_tqdm=False)
    return [gaps(output.prompt_logprobs, text.tokens) for output, text in zip(outputs, texts, strict=True)]


def gaps(positions: Sequence[Mapping[int, Any] | None], tokens: Sequence[int]) -> list[float]:
    """How far below the first choice each of the last ``len(tokens)`` positions is.

    Args:
        positions: vLLM's prompt logprobs: at each position the token that stands there and the likeliest one, and
            None at the first, which nothing comes before.
        tokens: the tokens that stand at the last positions.
    """
    found = []
    for choices, token in zip(positions[len(positions) - len(tokens) :], tokens, strict=True):
        assert choices is not None  # only of a text without a prompt, and vLLM takes none
        found.append(float(max(choice.logprob for choice in choices.values()) - choices[token].logprob))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
