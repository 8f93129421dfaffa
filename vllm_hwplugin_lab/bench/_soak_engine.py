# SPDX-License-Identifier: Apache-2.0
"""An engine's work in a soak: run the load, or judge texts.

The judge, an engine without speculation, reads each text once and returns every token's distance below its own first
choice. In a greedy text the distance is zero; in bfloat16 near-ties depend on the shape of the batch, and have small
distances.

Requests and their concurrency are drawn from a seed, independently of the engine. So every engine gets the same
requests, and two engines that draft alike get them at the same steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._child import Answer
from ._inside import counters, model_runner
from ._job import Workload
from ._watch import watched

#: Most new tokens of a request that does not run to the model's limit.
_MAX_TOKENS = 160
#: One in this many requests runs to the model's limit, where drafts reach beyond the last position.
_TO_THE_LIMIT = 16
#: Fewest and most steps with an unchanged number of requests.
_HOLD = (4, 48)
_FIRST_HOLD = 24
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """A request: the prompt's token ids, and the number of new tokens."""

    prompt: tuple[int, ...]
    max_tokens: int


def requests(pool: Sequence[Sequence[int]], seed: int, max_model_len: int) -> Iterator[Request]:
    """Yield requests forever: prompts of ``pool``, joined and cut at any token.

    Args:
        pool: Prompts of token ids. Two joined prompts must leave tokens for an answer within ``max_model_len``.
        max_model_len: Most tokens of prompt and answer together.
    """
    dice = random.Random(f"requests {seed}")
    while True:
        joined = [*dice.choice(pool), *dice.choice(pool)]
        prompt = tuple(joined[: dice.randint(1, len(joined))])
        room = max_model_len - len(prompt)
        to_the_limit = dice.randrange(_TO_THE_LIMIT) == 0
        yield Request(prompt, room if to_the_limit else dice.randint(1, min(room, _MAX_TOKENS)))


def wanted(seed: int, max_num_seqs: int) -> Iterator[int]:
    """Yield the number of requests per step.

    First one request, then the most, then any number between.
    """
    dice = random.Random(f"wanted {seed}")
    for size in (1, max_num_seqs):
        yield from [size] * _FIRST_HOLD
    while True:
        yield from [dice.randint(1, max_num_seqs)] * dice.randint(*_HOLD)


def soak(llm: Any, command: Mapping[str, Any], workload: Workload, answer: Answer) -> dict[str, Any]:
    """Load the engine until the command's ``steps`` or ``until``.

    The load has at most ``batch`` requests of ``workload``'s prompts; they are finished after the end.
    """
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    steps, until, length = command["steps"], command["until"], llm.llm_engine.vllm_config.model_config.max_model_len
    engine, running = llm.llm_engine, 0
    texts: list[tuple[int, list[int], list[int]]] = []
    coming = requests(workload.prompts, command["seed"], length)
    sizes = wanted(command["seed"], workload.batch)
    sent: list[Request] = []
    started = reported = time.perf_counter()
    runner = model_runner(llm)
    graphs = None if getattr(runner, "device", torch.device("cpu")).type == "cpu" else torch.cuda.CUDAGraph
    with watched(runner, graphs) as counts:

        def goes_on() -> bool:
            return counts.steps < steps and (until is None or time.time() < until)

        while running or goes_on():
            size = next(sizes) if goes_on() else 0
            while running < size:
                sent.append(next(coming))
                sampling = SamplingParams(
                    temperature=0.0,
                    max_tokens=sent[-1].max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt = {"prompt_token_ids": list(sent[-1].prompt)}
                engine.add_request(str(len(sent) - 1), prompt, sampling)
                running += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    number = int(output.request_id)
                    texts.append((number, list(sent[number].prompt), list(output.outputs[0].token_ids)))
            if time.perf_counter() - reported > _PROGRESS_SECONDS:
                reported = time.perf_counter()
                answer.say("progress", steps=counts.steps)
    counted = counters(llm)
    return {
        "seconds": time.perf_counter() - started,
        "requests": len(sent),
        "tokens": sum(len(text) for _, _, text in texts),
        "drafts": counted["drafts"],
        "accepted_per_position": counted["accepted"],
        **counts.facts(),
        "texts": sorted(texts),
    }


def judge(llm: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """Return each answer token's distance to the first choice.

    In nats, for each prompt and its answer.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    whole = [[*prompt, *tokens] for prompt, tokens in texts]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in whole], sampling_params=sampling, use_tqdm=False)
    return [gaps(output.prompt_logprobs, tokens) for output, (_, tokens) in zip(outputs, texts, strict=True)]


def gaps(positions: Sequence[Mapping[int, Any] | None], tokens: Sequence[int]) -> list[float]:
    """Return the distance to the first choice at the last positions.

    Args:
        positions: vLLM's prompt logprobs: at each position the text's token and the likeliest token; None at the first.
    """
    distances = []
    for choices, token in zip(positions[len(positions) - len(tokens) :], tokens, strict=True):
        assert choices is not None  # vLLM accepts no text without a prompt
        distances.append(float(max(choice.logprob for choice in choices.values()) - choices[token].logprob))
    return distances
