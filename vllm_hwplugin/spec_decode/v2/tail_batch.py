# SPDX-License-Identifier: Apache-2.0
"""Which batches the graphs of a step's tail serve, and by which of them: plain values in, an answer out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np

from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.step_counts import Reason


class SamplerParts(Enum):
    """The parts of vLLM's sampler that a batch needs. vLLM leaves a part out that no request of the batch needs."""

    #: Every temperature is 0 or 1.
    PLAIN = (False, False, False)
    TEMPERATURE = (True, False, False)
    TOP_K = (True, True, False)
    TOP_P = (True, False, True)
    TOP_K_TOP_P = (True, True, True)

    @classmethod
    def of(cls, states: Any, rows: np.ndarray, top_p_apart: bool = False) -> SamplerParts | None:
        """What the requests at `rows` of vLLM's `SamplingStates` need; None where no one request needs all of it.

        With top-k or top-p the temperature is always applied, which changes nothing where it is 0 or 1.

        Args:
            states: of the sampler.
            rows: [number of requests], integers.
            top_p_apart: whether vLLM has kernels of their own for requests with top-p and without top-k, which are
                left out of a batch without such requests.
        """
        temperature = states.temperature.np[rows]
        has_top_k = states.top_k.np[rows] != states.vocab_size
        has_top_p = states.top_p.np[rows] != 1.0
        top_k, top_p = bool(has_top_k.any()), bool(has_top_p.any())
        if top_p_apart and top_k and bool((has_top_p & ~has_top_k).any()):
            return None
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


def rungs(full_graphs: Iterable[tuple[int, int | None]], query_len: int, most: int = MAX_NUM_REQS) -> list[GraphShape]:
    """The shapes to capture, largest first: those in which the target decodes in a FULL graph.

    Args:
        full_graphs: (num_reqs, uniform_token_count) of each of the target's FULL graphs.
        query_len: tokens of a request in a decode batch.
        most: requests in the largest.
    """
    found = {count for count, uniform in full_graphs if uniform == query_len and count <= most}
    return [uniform_shape(query_len, count) for count in sorted(found, reverse=True)]


def no_decode(batch: Any, query_len: int) -> Reason | None:
    """Why not each request of vLLM's `InputBatch` decodes one token and all the drafts that it can have; or None."""
    if batch.is_prefilling_np.any():
        return Reason.PROMPT
    if batch.has_structured_output_reqs:
        return Reason.STRUCTURED_OUTPUT
    full = batch.num_reqs * query_len
    if batch.num_tokens != full or batch.num_draft_tokens != full - batch.num_reqs:
        return Reason.FEWER_DRAFTS
    return None
