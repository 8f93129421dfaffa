# SPDX-License-Identifier: Apache-2.0
"""The attention shapes that are measured, and which kernels run which."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product

from ._supervise import Cell

OURS = "hwplugin"
#: The kernels that serve where the one for Hopper cannot be had.
OURS_TRITON = "hwplugin, Triton"
TRITON = "TRITON_ATTN"
FLEX = "FLEX_ATTENTION"
SDPA = "SDPA"
SDPA_REPEATED = "SDPA, heads repeated"
FA3 = "FLASH_ATTN 3"
FA4 = "FLASH_ATTN 4"

#: Bytes of a bfloat16.
_ELEMENT = 2
#: A drawn length is so many times the mean at most: no single draw decides how much memory and time a case takes.
_LONGEST = 8


@dataclass(frozen=True)
class AttentionCase:
    """A batch of requests over a paged cache in bfloat16, causal.

    Attributes:
        kind: ``decode`` (verification included) or ``prefill``.
        context: keys of a request, those of its query tokens included; the mean of what is drawn where they differ.
        query: query tokens of a request.
        spread: standard deviation of the logarithm of the requests' lengths; 0 where all are equal.
    """

    kind: str
    batch: int
    context: int
    query: int
    kv_heads: int
    heads: int = 8
    head_size: int = 512
    page: int = 16
    spread: float = 0.0

    @property
    def key(self) -> str:
        shape = f"b{self.batch} c{self.context} q{self.query} h{self.heads}/{self.kv_heads} d{self.head_size}"
        return f"{self.kind} {shape}{f' s{self.spread:g}' if self.spread else ''}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each request. Drawn ones are the same in every run, from ``query`` to eight times ``context``."""
        if not self.spread:
            return (self.context,) * self.batch
        # Whatever the heads and query tokens are, so that these can be compared.
        source = random.Random(f"{self.batch} {self.context} {self.spread}")
        draws = [source.gauss(0, self.spread) - self.spread**2 / 2 for _ in range(self.batch)]
        wanted = [round(self.context * math.exp(draw)) for draw in draws]
        return tuple(min(max(length, self.query), _LONGEST * self.context) for length in wanted)

    @property
    def tokens(self) -> int:
        return self.batch * self.query

    @property
    def pages(self) -> tuple[int, ...]:
        """Of each request."""
        return tuple(-(-length // self.page) for length in self.lengths)

    @property
    def cache_elements(self) -> int:
        """Of the pages for the keys, with what the last page of a request has no key for."""
        return sum(self.pages) * self.page * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.kv_heads * self.head_size * _ELEMENT

    @property
    def bytes_each(self) -> int:
        """What a launch has to move: keys and values, query and output."""
        return self.kv_bytes + 2 * self.tokens * self.heads * self.head_size * _ELEMENT

    @property
    def flops(self) -> int:
        """Of both products, over the pairs that the causal mask leaves."""
        earlier = sum(self.lengths) - self.tokens
        pairs = self.query * earlier + self.tokens * (self.query + 1) // 2
        return 4 * self.heads * self.head_size * pairs


DECODE = tuple(
    AttentionCase("decode", batch, context, query, kv_heads)
    for kv_heads, batch, context, query in product((1, 4), (1, 8, 64), (1024, 8192, 32768), (1, 4, 8, 16, 32))
)
UNEVEN = tuple(
    AttentionCase("decode", batch, context, query, kv_heads, spread=1.0)
    for kv_heads, batch, context, query in product((1, 4), (8, 24, 64), (1024, 8192), (1, 8))
)
NO_POWER_OF_TWO = tuple(
    AttentionCase("decode", batch, context, query, 1)
    for batch, context, query in product((24, 100), (1024, 8192), (1, 8))
)
#: Batches as a server has them, which no goal speaks of.
AS_SERVED = (*UNEVEN, *NO_POWER_OF_TWO)
#: 8k tokens, as one request and as four.
PREFILL = tuple(
    AttentionCase("prefill", batch, length, length, kv_heads)
    for kv_heads, (batch, length) in product((1, 4), ((1, 8192), (4, 2048)))
)
#: The same tokens at the head size that FlashAttention 3 was made for.
PREFILL_256 = tuple(AttentionCase("prefill", c.batch, c.context, c.query, c.kv_heads, head_size=256) for c in PREFILL)
CASES = {case.key: case for case in (*PREFILL, *PREFILL_256, *DECODE, *AS_SERVED)}

_PREFILL_KERNELS = (OURS, OURS_TRITON, SDPA, SDPA_REPEATED, TRITON, FA4, FLEX)


def plan() -> tuple[Cell, ...]:
    """Every cell, the ones that matter most first: a run whose time is over loses the end.

    The kernels of a case stand side by side, so that a clock that changes in the course of the run treats them alike.
    """
    prefill = product(PREFILL, _PREFILL_KERNELS)
    prefill_256 = product(PREFILL_256, (FA3,))
    decode = product(DECODE, (OURS, TRITON, FA4))
    served = product(AS_SERVED, (OURS, TRITON, FA4))
    more = product(DECODE, (OURS_TRITON,))
    groups = (prefill_256, prefill, decode, served, more)
    return tuple((kernel, case.key) for group in groups for case, kernel in group)
