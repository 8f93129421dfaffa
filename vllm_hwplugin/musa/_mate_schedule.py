# SPDX-License-Identifier: Apache-2.0
"""Key splits of a decode batch on a Moore Threads GPU. Not run on MUSA hardware.

Without a schedule mate gives each request and KV head one thread block, so a few requests with long contexts leave most
of the device idle. A schedule splits the keys of a request into parts that run in parallel. It is a tensor that a
kernel computes from the batch's lengths; a graph reads it at the address of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import torch

# The most parts that mate's (0.2.2) kernels can combine.
_MOST: Final = 128

#: Arguments of ``mate.get_scheduler_metadata`` that a schedule needs.
ARGUMENTS: Final = (
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "qkv_dtype", "cu_seqlens_q",
    "seqused_k", "page_size", "causal", "window_size", "num_splits",
)  # fmt: skip


class Schedule(NamedTuple):
    """The schedule of a batch, for one number of query heads.

    Attributes:
        tensor: mate's schedule, int32; always the same tensor for one number of requests.
        splits: Most parts of a request's keys. The attention allocates memory for that many, so both calls of mate need
            the same number.
    """

    tensor: torch.Tensor
    splits: int


class Schedules:
    """The schedules of a metadata builder's batches.

    Args:
        plan: ``mate.get_scheduler_metadata``.
        heads: The layers' numbers of query heads. Most models have one; a drafter's layer may share the target's KV
            cache group and have another.
        kv_heads: KV heads of all layers.
        head_size: Elements per head.
        dtype: Type of queries and keys.
        page_size: Tokens per block of the KV cache.
        window: Tokens that a query attends to, itself included; None: all.
        compute_units: Compute units of the device.
        most: Most parts of a request's keys.
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
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    def splits(self, num_reqs: int) -> int:
        """Return the number of parts that fill the device.

        It is 1 if the requests' KV heads fill it already. The number depends only on a graph's shape, so capture and
        replay have the same number of parts.
        """
        return max(1, min(self._most, -(-self._units // (num_reqs * self._kv_heads)))) if self._heads else 1

    def of(self, metadata: Any) -> Mapping[int, Schedule]:
        """Return a batch's schedules by number of query heads.

        Empty: one part per request is best.

        Args:
            metadata: vLLM's ``FlashAttentionMetadata``.
        """
        num_reqs = metadata.seq_lens.shape[0]
        splits = self.splits(num_reqs)
        if splits == 1:
            return {}
        return {heads: Schedule(self._refreshed(heads, num_reqs, splits, metadata), splits) for heads in self._heads}

    def _refreshed(self, heads: int, num_reqs: int, splits: int, metadata: Any) -> torch.Tensor:
        fresh = self._plan(
            batch_size=num_reqs,
            max_seqlen_q=metadata.max_query_len,
            # The attention uses the page table's capacity; the longest request would choose another kernel.
            max_seqlen_k=metadata.block_table.shape[1] * self._page_size,
            num_heads_q=heads,
            seqused_k=metadata.seq_lens,
            cu_seqlens_q=metadata.query_start_loc,
            causal=metadata.causal,
            window_size=self._window,
            num_splits=splits,
            **self._same,
        )
        # mate's layout depends on the number of requests, so each number has a tensor.
        schedule = self._tensors.setdefault((heads, num_reqs), fresh)
        if schedule is not fresh:
            # An inference tensor is writable only in inference mode, and vLLM builds metadata in and out of it.
            with torch.inference_mode():
                schedule.copy_(fresh)
        return schedule
