# SPDX-License-Identifier: Apache-2.0
"""A long load whose batch size keeps changing: which requests there are, and how many are wanted at once.

Both are drawn from a seed and neither depends on the engine, so every engine gets the same requests, and two engines
that draft alike get them at the same steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: New tokens of a request, at most, unless it is one of those that run into the model's limit.
_MAX_TOKENS = 160
#: One request in so many runs until the model's limit, where drafts reach beyond the last position.
_TO_THE_LIMIT = 16
#: For how many steps the number of wanted requests stays as it is.
_HOLD = (4, 48)
_FIRST_HOLD = 24


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
