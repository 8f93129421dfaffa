# SPDX-License-Identifier: Apache-2.0
"""The tensors of a case: random inputs, a shuffled block table, and poison in memory that must not be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from ._cases import Case

#: Fills memory that no result may depend on: unused blocks, slots after the last token, and blocks that unused columns
#: of the block table name. It is finite, because a real cache holds old values there, never NaN, and its scores
#: dominate.
POISON: Final = 64.0
SPARE_BLOCKS: Final = 3
SPARE_COLUMNS: Final = 2


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    ``query`` is packed over the requests. ``keys``, ``values`` and ``slots`` (their cache positions) have one tensor
    per request, with its context. ``block_table`` has a row per request and padding row.
    """

    query: Any  # [num_tokens, num_heads, head_size]
    keys: tuple[Any, ...]  # [total, num_kv_heads, head_size] each
    values: tuple[Any, ...]
    slots: tuple[Any, ...]  # int64 [total] each
    block_table: Any  # int32 [rows, columns]
    num_blocks: int
    sinks: Any | None  # [num_heads], in the dtype of the query
    alibi_slopes: tuple[float, ...] | None


def make_inputs(case: Case, device: Any) -> Inputs:
    """Draw a case's tensors from its seed.

    Args:
        device: The tensors' device. Large tensors are drawn on it, so a seed is reproducible per kind of device.
    """
    source = torch.Generator().manual_seed(case.seed)
    values_source = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=values_source, device=device).to(dtype)

    needed = [-(-request.total // case.block_size) for request in case.requests]
    num_blocks = 1 + sum(needed) + SPARE_BLOCKS
    # vLLM reserves block 0 for padding rows.
    order = 1 + torch.randperm(num_blocks - 1, generator=source)
    owned, spare = order[: sum(needed)].split(needed), order[sum(needed) :]
    rows = len(needed) + case.padding
    table = spare[torch.randint(len(spare), (rows, max(needed) + SPARE_COLUMNS), generator=source)].to(torch.int32)
    for row, blocks in enumerate(owned):
        table[row, : len(blocks)] = blocks
    table[len(needed) :] = 0
    offsets = torch.arange(case.block_size)
    slots = [
        (blocks[:, None] * case.block_size + offsets).flatten()[: request.total]
        for blocks, request in zip(owned, case.requests, strict=True)
    ]
    heads, shape = case.num_heads, (case.num_kv_heads, case.head_size)
    return Inputs(
        query=normal(case.num_tokens, heads, case.head_size),
        keys=tuple(normal(request.total, *shape) for request in case.requests),
        values=tuple(normal(request.total, *shape) for request in case.requests),
        slots=tuple(positions.to(device) for positions in slots),
        block_table=table.to(device),
        num_blocks=num_blocks,
        sinks=normal(heads) + 2 if case.sinks else None,
        alibi_slopes=tuple(2 ** (-8 * (head + 1) / heads) for head in range(heads)) if case.alibi else None,
    )


def poison(cache: Any, seed: int) -> None:
    """Fill a KV cache with values that would spoil a result.

    Args:
        cache: Floats, or bytes of a float8 format.
    """
    source = torch.Generator(cache.device).manual_seed(seed)
    options = {"generator": source, "device": cache.device}
    if cache.element_size() == 1:
        # Up to 0x7B these bytes are finite in both float8 formats; the top bit is the sign.
        raw = torch.randint(0x7C, cache.shape, **options) | torch.randint(2, cache.shape, **options) << 7
        cache.view(torch.uint8).copy_(raw.to(torch.uint8))
        return
    cache.copy_((torch.randn(cache.shape, **options) * POISON).to(cache.dtype))
