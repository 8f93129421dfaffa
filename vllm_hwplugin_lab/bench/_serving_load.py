# SPDX-License-Identifier: Apache-2.0
"""A load as clients make it: requests that come by a clock or wait for a place, and when each got its tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any


async def run_load(engine: Any, load: dict[str, Any]) -> dict[str, Any]:
    """Send every request of a load, and wait for all of them.

    Args:
        engine: vLLM's asynchronous engine.
        load: ``requests``, each with a ``prompt`` (text, token ids, or a number of random tokens), ``max_tokens`` and
            ``at``, the second at which it is sent; ``concurrency``, at most so many at once, or None; ``temperature``;
            ``seed``, of random prompts; ``ignore_eos``; ``detokenize``; and ``chat``: texts go through the model's chat
            template where it has one.

    Returns:
        ``seconds`` of the whole, and ``requests`` in the order of the load: each ``prompt_tokens``, ``tokens``,
        ``ttft`` (seconds until the first), ``e2e`` (until the last), both None of a request that got none, and ``gaps``
        (seconds between parts of the stream).
    """
    prompts = prompt_ids(engine.vllm_config.model_config, load)
    places = asyncio.Semaphore(load["concurrency"]) if load["concurrency"] else None
    name = f"load {time.monotonic_ns()}"
    started = time.perf_counter()

    async def one(number: int, prompt: Sequence[int], wanted: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, started + wanted["at"] - time.perf_counter()))
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            return await _request(engine, f"{name} {number}", prompt, load, wanted["max_tokens"])

    pairs = enumerate(zip(prompts, load["requests"], strict=True))
    answers = await asyncio.gather(*(one(number, prompt, wanted) for number, (prompt, wanted) in pairs))
    return {"seconds": time.perf_counter() - started, "requests": answers}


async def _request(
    engine: Any, name: str, prompt: Sequence[int], load: dict[str, Any], max_tokens: int
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=load["temperature"],
        max_tokens=max_tokens,
        ignore_eos=load["ignore_eos"],
        detokenize=load["detokenize"],
        output_kind=RequestOutputKind.DELTA,
    )
    tokens, times = 0, [time.perf_counter()]
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, sampling, name):
        if new := len(output.outputs[0].token_ids):
            tokens += new
            times.append(time.perf_counter())
    return {"prompt_tokens": len(prompt), "tokens": tokens, **latencies(times)}


def latencies(times: Sequence[float]) -> dict[str, Any]:
    """Of one request: when it was sent, then each time that it got tokens; in seconds."""
    sent, *got = times
    gaps = [after - before for before, after in pairwise(got)]
    return {"ttft": got[0] - sent if got else None, "e2e": got[-1] - sent if got else None, "gaps": gaps}


def prompt_ids(model_config: Any, load: dict[str, Any]) -> list[list[int]]:
    """The token ids of each request's prompt.

    Args:
        model_config: vLLM's, of the target.
        load: see :func:`run_load`.
    """
    dice = random.Random(load["seed"])
    found: list[list[int]] = []
    tokenizer: Any = None
    for wanted in load["requests"]:
        prompt = wanted["prompt"]
        if isinstance(prompt, int):
            vocabulary = model_config.get_vocab_size()
            found.append([dice.randrange(1, vocabulary) for _ in range(prompt)])
        elif isinstance(prompt, str):
            if tokenizer is None:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(model_config.tokenizer)
            text, special = prompt, True
            if load["chat"] and tokenizer.chat_template:
                messages = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                special = False  # the template has them
            found.append(list(tokenizer(text, add_special_tokens=special).input_ids))
        else:
            found.append(list(prompt))
    return found
