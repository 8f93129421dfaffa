# SPDX-License-Identifier: Apache-2.0
"""The attention shapes to measure, and the kernels for each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product

from ._supervise import Cell

OURS = "hwplugin"
#: The plugin's kernels for devices without the kernel for Hopper.
OURS_TRITON = "hwplugin, Triton"
TRITON = "TRITON_ATTN"
FLEX = "FLEX_ATTENTION"
SDPA = "SDPA"
SDPA_REPEATED = "SDPA, heads repeated"
FA3 = "FLASH_ATTN 3"
FA4 = "FLASH_ATTN 4"

#: Bytes of a bfloat16.
_ELEMENT = 2
#: Longest drawn length in units of the mean, so that no single draw decides a case's memory and time.
_LONGEST = 8


@dataclass(frozen=True)
class AttentionCase:
    """A batch of requests over a paged cache in bfloat16, causal.

    Attributes:
        kind: ``decode`` (with verification) or ``prefill``.
        context: Keys of a request, query tokens included; the mean if lengths are drawn.
        query: Query tokens of a request.
        spread: Standard deviation of the logarithm of the requests' lengths; 0: equal lengths.
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
        """Keys of each request. Drawn lengths are reproducible, from ``query`` to eight times ``context``."""
        if not self.spread:
            return (self.context,) * self.batch
        # Independent of heads and query tokens, so that cases can be compared.
        source = random.Random(f"{self.batch} {self.context} {self.spread}")
        draws = [source.gauss(0, self.spread) - self.spread**2 / 2 for _ in range(self.batch)]
        wanted = [round(self.context * math.exp(draw)) for draw in draws]
        return tuple(min(max(length, self.query), _LONGEST * self.context) for length in wanted)

    @property
    def tokens(self) -> int:
        return self.batch * self.query

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-length // self.page) for length in self.lengths)

    @property
    def cache_elements(self) -> int:
        """Elements of the keys' pages, with the unused slots of last pages."""
        return sum(self.pages) * self.page * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.kv_heads * self.head_size * _ELEMENT

    @property
    def bytes_each(self) -> int:
        """Bytes that a launch moves: keys, values, query and output."""
        return self.kv_bytes + 2 * self.tokens * self.heads * self.head_size * _ELEMENT

    @property
    def flops(self) -> int:
        """FLOPs of both products, over the unmasked pairs."""
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
#: Batches as in a server; the project's goals are not about these.
AS_SERVED = (*UNEVEN, *NO_POWER_OF_TWO)
#: 8k tokens, as one request and as four.
PREFILL = tuple(
    AttentionCase("prefill", batch, length, length, kv_heads)
    for kv_heads, (batch, length) in product((1, 4), ((1, 8192), (4, 2048)))
)
#: The same tokens with FlashAttention 3's largest head size.
PREFILL_256 = tuple(AttentionCase("prefill", c.batch, c.context, c.query, c.kv_heads, head_size=256) for c in PREFILL)
CASES = {case.key: case for case in (*PREFILL, *PREFILL_256, *DECODE, *AS_SERVED)}

_PREFILL_KERNELS = (OURS, OURS_TRITON, SDPA, SDPA_REPEATED, TRITON, FA4, FLEX)


def plan() -> tuple[Cell, ...]:
    """Return all cells, the most important first.

    A run at its time limit drops the end. The kernels of a case are adjacent, so that a changing clock affects them
    equally.
    """
    prefill = product(PREFILL, _PREFILL_KERNELS)
    prefill_256 = product(PREFILL_256, (FA3,))
    decode = product(DECODE, (OURS, TRITON, FA4))
    served = product(AS_SERVED, (OURS, TRITON, FA4))
    more = product(DECODE, (OURS_TRITON,))
    groups = (prefill_256, prefill, decode, served, more)
    return tuple((kernel, case.key) for group in groups for case, kernel in group)
