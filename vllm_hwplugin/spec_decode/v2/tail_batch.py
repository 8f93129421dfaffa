# SPDX-License-Identifier: Apache-2.0
"""Which batches the graphs of a step's tail serve, and by which of them: plain values in, an answer out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

#: Larger batches keep a GPU busy for longer than the host needs for a step, and their logits are what graphs need
#: memory for.
MAX_NUM_REQS: Final = 64


_HANDLED: Final = frozenset(("temperature", "top_k", "top_p", "seed"))

#: What other parts of vLLM do with a request. The tokens to stop at matter to the sampler with `min_tokens` alone, and

_NOT_THE_SAMPLERS: Final = frozenset(
    (
        *("n", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "_eos_token_id", "_all_stop_token_ids"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("output_kind", "output_text_buffer_length", "stream_interval", "skip_clone", "skip_reading_prefix_cache"),
        *("repetition_detection", "_bad_words_token_ids", "watermarking", "_watermarking_skipped"),
    )
)


class Sampling(Enum):
    """The parts of vLLM's sampler that a batch needs. vLLM leaves a part out that no request of the batch needs."""

    #: Every temperature is 0 or 1.
    PLAIN = (False, False, False)
    TEMPERATURE = (True, False, False)
    TOP_K = (True, True, False)
    TOP_P = (True, False, True)
    TOP_K_TOP_P = (True, True, True)

    @classmethod
    def of(cls, states: Any, rows: np.ndarray) -> Sampling:
        """What the requests at `rows` of vLLM's `SamplingStates` need.

        With top-k or top-p the temperature is always applied, which changes nothing where it is 0 or 1.
        """
        temperature = states.temperature.np[rows]
        top_k = bool(np.any(states.top_k.np[rows] != states.vocab_size))
        top_p = bool(np.any(states.top_p.np[rows] != 1.0))
        scaled = top_k or top_p or not bool(np.all((temperature == 0.0) | (temperature == 1.0)))
        return cls((scaled, top_k, top_p))

    def example(self) -> dict[str, float]:
        """Arguments of `SamplingParams` for a request that needs exactly this."""
        scaled, top_k, top_p = self.value
        return (
            {"temperature": 0.5 if scaled else 0.0}
            | ({"top_k": 2} if top_k else {})
            | ({"top_p": 0.5} if top_p else {})
        )


@dataclass(frozen=True)
class Rung:
    """The shape of a graph: `num_reqs` requests of `query_len` tokens each."""

    num_reqs: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.query_len


def rungs(full_graphs: Iterable[tuple[int, int | None]], query_len: int, most: int = MAX_NUM_REQS) -> list[Rung]:
    """The shapes to capture, largest first: those in which the target decodes in a FULL graph.

    Args:
        full_graphs: (num_reqs, uniform_token_count) of each of the target's FULL graphs.
        query_len: tokens of a request in a decode batch.
        most: requests in the largest.
    """
    found = {count for count, uniform in full_graphs if uniform == query_len and count <= most}
    return [Rung(count, query_len) for count in sorted(found, reverse=True)]


def asks_for_nothing_else(params: Any) -> bool:
    """Whether vLLM's sampler does nothing for a request of these `SamplingParams` but what `Sampling` names.

    A parameter that is not known here has to have its default value: a vLLM may have learned to do more.
    """
    default = type(params)()
    return all(
        getattr(params, name) == getattr(default, name)
        for name in params.__struct_fields__
        if name not in _HANDLED and name not in _NOT_THE_SAMPLERS
    )


def decodes_only(batch: Any, query_len: int) -> bool:
    """Whether each request of vLLM's `InputBatch` decodes one token and all the drafts that it can have."""
    return bool(
        batch.num_tokens == batch.num_reqs * query_len
        and batch.num_draft_tokens == batch.num_reqs * (query_len - 1)
        and not batch.has_structured_output_reqs
        and not batch.is_prefilling_np.any()
    )
