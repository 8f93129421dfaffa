# SPDX-License-Identifier: Apache-2.0
"""What an engine does in a soak: it runs the load, or it judges texts.

The judge, an engine without speculation, reads each text once and says how far below its own first choice every token
was. A greedy text has no such token; in bfloat16 a near-tie may go either way with the shape of the batch, and its gap
is small.

Which requests a load has, and how many are wanted at once, is drawn from a seed, and neither depends on the engine. So
every engine gets the same requests, and two engines that draft alike get them at the same steps.
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

#: New tokens of a request, at most, unless it is one of those that run into the model's limit.
_MAX_TOKENS = 160
#: One request in so many runs until the model's limit, where drafts reach beyond the last position.
_TO_THE_LIMIT = 16
#: For how many steps the number of wanted requests stays as it is.
_HOLD = (4, 48)
_FIRST_HOLD = 24
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """One request: token ids of the prompt, and how many new tokens end it."""

    prompt: tuple[int, ...]
    max_tokens: int


def requests(pool: Sequence[Sequence[int]], seed: int, max_model_len: int) -> Iterator[Request]:
    """Requests without end: beginnings of one or two prompts of ``pool`` in a row, cut at any token.

    Args:
        pool: prompts of token ids; two in a row must leave room for an answer within ``max_model_len``.
        seed: same seed, same requests.
        max_model_len: tokens of prompt and answer together, at most.
    """
    dice = random.Random(f"requests {seed}")
    while True:
        joined = [*dice.choice(pool), *dice.choice(pool)]
        prompt = tuple(joined[: dice.randint(1, len(joined))])
        room = max_model_len - len(prompt)
        to_the_limit = dice.randrange(_TO_THE_LIMIT) == 0
        yield Request(prompt, room if to_the_limit else dice.randint(1, min(room, _MAX_TOKENS)))


def wanted(seed: int, max_num_seqs: int) -> Iterator[int]:
    """How many requests to have in the engine, step by step: one first, then the most, then anything between."""
    dice = random.Random(f"wanted {seed}")
    for size in (1, max_num_seqs):
        yield from [size] * _FIRST_HOLD
    while True:
        yield from [dice.randint(1, max_num_seqs)] * dice.randint(*_HOLD)


def soak(llm: Any, command: Mapping[str, Any], workload: Workload, answer: Answer) -> dict[str, Any]:
    """Keep the engine under a load of ``workload``'s prompts and at most ``batch`` requests, until it has made the
    command's ``steps`` or the time is past ``until``; then let the requests that are in it end.
    """
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    steps, until, length = command["steps"], command["until"], llm.llm_engine.vllm_config.model_config.max_model_len
    engine, running = llm.llm_engine, 0
    texts: list[tuple[int, list[int], list[int]]] = []
    coming = requests(workload.prompts, command["seed"], length)
    sizes = wanted(command["seed"], workload.batch)
    asked: list[Request] = []
    started = said = time.perf_counter()
    runner = model_runner(llm)
    graphs = None if getattr(runner, "device", torch.device("cpu")).type == "cpu" else torch.cuda.CUDAGraph
    with watched(runner, graphs) as counts:

        def goes_on() -> bool:
            return counts.steps < steps and (until is None or time.time() < until)

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


def judge(llm: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """For each prompt and its answer, how far each of the answer's tokens is below the first choice, in nats."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    whole = [[*prompt, *tokens] for prompt, tokens in texts]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in whole], sampling_params=sampling, use_tqdm=False)
    return [gaps(output.prompt_logprobs, tokens) for output, (_, tokens) in zip(outputs, texts, strict=True)]


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
