# SPDX-License-Identifier: Apache-2.0
"""What the first pass of a drafter looks like, by the kind of drafter.

An autoregressive drafter reads the tokens that the target was given, so a decode batch has 1 + k of them a request and
a batch with prefill is ragged. A DFlash drafter reads no given token but the last: what it gets of the others is their
keys and values, put into its cache beforehand. Its queries are that token and k masks, in every batch, and each sees
the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass of one drafter.

    Attributes:
        query_len: tokens of a request; in a decode batch, or where `always_uniform` in every batch.
        max_tokens: what the drafter's buffers hold.
        always_uniform: whether batches with prefill have that shape too.
        causal: whether a query sees only those before it.
        tokens_only: whether the model is called with token ids and positions alone.
    """

    query_len: int
    max_tokens: int
    always_uniform: bool = False
    causal: bool = True
    tokens_only: bool = False


def first_pass_of(proposer: Any) -> FirstPass:
    """The first pass of a `SpecDecodeBaseProposer`."""
    num_speculative_tokens = proposer.speculative_config.num_speculative_tokens
    if proposer.speculative_config.use_dflash():
        return FirstPass(
            query_len=1 + num_speculative_tokens,
            max_tokens=proposer.max_query_tokens,
            always_uniform=True,
            # Before 0.23.0 vLLM knows non-causal drafts alone.
            causal=getattr(proposer, "dflash_causal", False),
            tokens_only=True,
        )
    return FirstPass(
        query_len=1 + num_speculative_tokens + proposer.net_num_new_slots_per_request,
        max_tokens=min(proposer.max_num_tokens, proposer.max_positions),
    )
