# SPDX-License-Identifier: Apache-2.0
"""How the keys of a decode batch are split over a Moore Threads GPU. Not run on MUSA hardware.

Without a schedule mate gives each request and KV head one block of threads, so a few requests with long contexts leave
most of the device idle. With one, the keys of a request are split into parts that run side by side. A schedule is a
tensor that a kernel makes of the batch's lengths; a captured graph reads it at the address that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import torch

# As many parts as mate (0.2.2) has kernels to put together again.
_MOST: Final = 128

#: Of ``mate.get_scheduler_metadata``, what a schedule is made with.
ARGUMENTS: Final = (
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "qkv_dtype", "cu_seqlens_q",
    "seqused_k", "page_size", "causal", "window_size", "num_splits",
)  # fmt: skip


class Schedule(NamedTuple):
    """Of one batch and one number of query heads.

    Attributes:
        tensor: what mate makes of the batch, int32; for one number of requests always the same tensor.
        splits: parts that the keys of a request have at most. The attention has room for that many, so both calls of
            mate must be given the same.
    """

    tensor: torch.Tensor
    splits: int


class Schedules:
    """Those of the batches that one metadata builder makes.

    Args:
        plan: ``mate.get_scheduler_metadata``.
        heads: the numbers of query heads of the builder's layers: one in most models; a drafter's layer may share the
            target's KV cache group and have another.
        kv_heads: of all of them, as everything below.
        head_size: elements.
        dtype: of queries and keys.
        page_size: tokens a block of the KV cache.
        window: tokens that a query sees before it, its own included; None for all.
        compute_units: of the device.
        most: parts at most.
    """

    def __init__(
        self,
        plan: Callable[..., torch.Tensor],
        *,
        heads: Collection[int],
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        page_size: int,
        window: int | None,
        compute_units: int,
        most: int,
    ) -> None:
        self._plan = plan
        self._heads = sorted(heads)
        self._kv_heads = kv_heads
        self._window = (-1, -1) if window is None else (window - 1, 0)
        self._units = compute_units
        self._most = min(most, _MOST)
        self._page_size = page_size
        self._same = {"num_heads_kv": kv_heads, "headdim": head_size, "qkv_dtype": dtype, "page_size": page_size}
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def splits(self, num_reqs: int) -> int:
        """Parts that fill the device; 1 where the requests' KV heads do that already.

        It depends only on what a graph's shape fixes, so that a graph is replayed with as many parts as it was captured
        with.
        """
        return max(1, min(self._most, -(-self._units // (num_reqs * self._kv_heads)))) if self._heads else 1

    def of(self, metadata: Any) -> Mapping[int, Schedule]:
        """The schedules of a batch, by number of query heads; none where one part for each request is best.

        Args:
            metadata: vLLM's ``FlashAttentionMetadata``.
        """
        num_reqs = metadata.seq_lens.shape[0]
        splits = self.splits(num_reqs)
        if splits == 1:
            return {}
        return {heads: Schedule(self._refreshed(heads, num_reqs, splits, metadata), splits) for heads in self._heads}

    def _refreshed(self, heads: int, num_reqs: int, splits: int, metadata: Any) -> torch.Tensor:
        made = self._plan(
            batch_size=num_reqs,
            max_seqlen_q=metadata.max_query_len,
            # What a page table holds is what the attention goes by; the longest request would choose another kernel.
            max_seqlen_k=metadata.block_table.shape[1] * self._page_size,
            num_heads_q=heads,
            seqused_k=metadata.seq_lens,
            cu_seqlens_q=metadata.query_start_loc,
            causal=metadata.causal,
            window_size=self._window,
            num_splits=splits,
            **self._same,
        )
        # Its layout is mate's own and goes by the number of requests, so each number has a tensor.
        kept = self._kept.setdefault((heads, num_reqs), made)
        if kept is not made:
            # What was made in this mode can be written to in no other, and vLLM builds metadata inside and outside.
            with torch.inference_mode():
                kept.copy_(made)
        return kept
