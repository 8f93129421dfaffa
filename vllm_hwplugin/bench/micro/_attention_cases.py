# SPDX-License-Identifier: Apache-2.0
"""The attention shapes that are measured, and which kernels run which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ._cells import Cell

OURS = "hwplugin"
#: The kernels that serve where the one for Hopper cannot be had.
OURS_TRITON = "hwplugin, Triton"
TRITON = "TRITON_ATTN"
FLASHINFER = "FLASHINFER"
FLEX = "FLEX_ATTENTION"
SDPA = "SDPA"
SDPA_REPEATED = "SDPA, heads repeated"
FA3 = "FLASH_ATTN 3"
FA3_CONTIGUOUS = "FLASH_ATTN 3, contiguous"
FA4 = "FLASH_ATTN 4"

#: Bytes of a bfloat16.
_ELEMENT = 2


@dataclass(frozen=True)
class AttentionCase:
    """A batch of equal requests over a paged cache in bfloat16, causal.

    Attributes:
        kind: ``decode`` (verification included) or ``prefill``.
        context: keys of a request, those of its query tokens included.
        query: query tokens of a request.
    """

    kind: str
    batch: int
    context: int
    query: int
    kv_heads: int
    heads: int = 8
    head_size: int = 512
    page: int = 16

    @property
    def key(self) -> str:
        return (
            f"{self.kind} b{self.batch} c{self.context} q{self.query} h{self.heads}/{self.kv_heads} d{self.head_size}"
        )

    @property
    def tokens(self) -> int:
        return self.batch * self.query

    @property
    def pages(self) -> int:
        """Of one request."""
        return -(-self.context // self.page)

    @property
    def kv_elements(self) -> int:
        """Of the keys alone, or of the values alone."""
        return self.batch * self.context * self.kv_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        return 2 * self.kv_elements * _ELEMENT

    @property
    def bytes_each(self) -> int:
        """What a launch has to move: keys and values, query and output."""
        return self.kv_bytes + 2 * self.tokens * self.heads * self.head_size * _ELEMENT

    @property
    def flops(self) -> int:
        """Of both products, over the pairs that the causal mask leaves."""
        earlier = self.context - self.query
        pairs = self.query * earlier + self.query * (self.query + 1) // 2
        return 4 * self.batch * self.heads * self.head_size * pairs


DECODE = tuple(
    AttentionCase("decode", batch, context, query, kv_heads)
    for kv_heads, batch, context, query in product((1, 4), (1, 8, 64), (1024, 8192, 32768), (1, 4, 8, 16, 32))
)
#: 8k tokens, as one request and as four.
PREFILL = tuple(
    AttentionCase("prefill", batch, length, length, kv_heads)
    for kv_heads, (batch, length) in product((1, 4), ((1, 8192), (4, 2048)))
)
#: The same tokens at the head size that FlashAttention 3 was made for.
PREFILL_256 = tuple(AttentionCase("prefill", c.batch, c.context, c.query, c.kv_heads, head_size=256) for c in PREFILL)
CASES = {case.key: case for case in (*PREFILL, *PREFILL_256, *DECODE)}

_PREFILL_KERNELS = (OURS, OURS_TRITON, SDPA, SDPA_REPEATED, TRITON, FA4, FLEX, FLASHINFER)


def plan() -> tuple[Cell, ...]:
    """Every cell, the ones that matter most first: a run whose time is over loses the end.

    The kernels of a case stand side by side, so that a clock that changes in the course of the run treats them alike.
    """
    prefill = product(PREFILL, _PREFILL_KERNELS)
    prefill_256 = product(PREFILL_256, (FA3, FA3_CONTIGUOUS))
    decode = product(DECODE, (OURS, TRITON))
    more = product(DECODE, (OURS_TRITON, FA4, FLASHINFER))
    return tuple((kernel, case.key) for group in (prefill_256, prefill, decode, more) for case, kernel in group)
