# SPDX-License-Identifier: Apache-2.0
"""Draft rows in PyTorch: for CPUs, for GPUs without the kernels, and to check each restore."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_hwplugin.nwor.layout import CacheRows
from vllm_hwplugin.nwor.rows import Batch, Rejected


class ReferenceRows:
    """:class:`vllm_hwplugin.nwor.rows.KernelRows` in PyTorch.

    An index that depends on data would wait for the device. So rows that must not change are rewritten with their own
    content, at slot 0: it is in vLLM's null block, which no request reads.
    """

    def __init__(self, caches: Sequence[CacheRows], batch: Batch, keep: bool):
        self._caches, self._batch, self._keep = caches, batch, keep
        self._column = torch.arange(batch.drafts, device=batch.query_start_loc.device)
        rows = batch.max_num_reqs * batch.drafts if keep else 0
        # Only the drafter uses the other groups: their slot mappings are updated, not their caches.
        self._num_slots = {cache.group: cache.num_slots for cache in caches}
        self._log = [cache.rows.new_empty((rows, cache.num_bytes)) for cache in caches]
        self._slots = {group: self._column.new_full((rows,), -1) for group in batch.slot_mappings}

    def log(self, num_reqs: int) -> None:
        for group, slots in self._slots_now(num_reqs).items():
            self._slots[group][: len(slots)].copy_(slots)
        for cache, log in zip(self._caches, self._log, strict=True):
            slots = self._slots[cache.group][: num_reqs * self._batch.drafts]
            log[: len(slots)].copy_(_read(cache, slots.clamp(min=0)))

    def restore(self, rejected: Rejected) -> None:
        by_group = self.rejected_slots(rejected)
        for cache, log in zip(self._caches, self._log, strict=True):
            slots = by_group[cache.group]
            where = slots.clamp(min=0)
            new = log[: len(slots)] if self._keep else log.new_zeros(())
            _write(cache, where, torch.where((slots >= 0)[:, None], new, _read(cache, where)))
        rows = self._tokens(rejected.num_reqs).flatten()
        for group, slots in by_group.items():
            mapping = self._batch.slot_mappings[group]
            # The batch's first token is never a draft: rewriting its slot changes nothing.
            tokens = torch.where(slots >= 0, rows, 0)
            mapping[tokens] = torch.where(slots >= 0, -1, mapping[tokens])
            self._slots[group][: len(slots)].fill_(-1)

    def rejected_slots(self, rejected: Rejected) -> dict[int, torch.Tensor]:
        """Return slots of rejected drafts, else -1: by group, [requests * drafts]."""
        num_reqs, drafts = rejected.num_reqs, self._batch.drafts
        out = (self._column >= drafts - _counts(rejected)[:, None]).flatten()
        slots = (
            {group: slots[: num_reqs * drafts] for group, slots in self._slots.items()}
            if self._keep
            else self._slots_now(num_reqs)
        )
        return {group: torch.where(out, rows, -1) for group, rows in slots.items()}

    def differing(self, slots: dict[int, torch.Tensor], zeros: bool) -> list[tuple[CacheRows, int, int]]:
        """Wait, and return cache, slot and number of wrong bytes.

        Args:
            slots: :meth:`rejected_slots` from before the caches were restored.
            zeros: whether zeros are expected, not the kept bytes.
        """
        differing = []
        for cache, log in zip(self._caches, self._log, strict=True):
            rows = (slots[cache.group] >= 0).nonzero().flatten()
            where = slots[cache.group][rows]
            expected = log.new_zeros((1, cache.num_bytes)) if zeros else log[rows]
            wrong = (_read(cache, where) != expected).sum(1)
            differing += [
                (cache, int(slot), int(count))
                for slot, count in zip(where.tolist(), wrong.tolist(), strict=True)
                if count
            ]
        return differing

    @property
    def num_bytes(self) -> int:
        return int(sum(log.numel() for log in self._log) + sum(8 * slots.numel() for slots in self._slots.values()))

    def _tokens(self, num_reqs: int) -> torch.Tensor:
        """Return [requests, drafts] tokens; missing drafts get other requests' or negative ones."""
        ends = self._batch.query_start_loc[1 : num_reqs + 1]
        return ends[:, None] - self._batch.drafts + self._column

    def _slots_now(self, num_reqs: int) -> dict[int, torch.Tensor]:
        tokens = self._tokens(num_reqs)
        drafted = tokens > self._batch.query_start_loc[:num_reqs, None]
        by_group = {}
        for group, mapping in self._batch.slot_mappings.items():
            slots = mapping[tokens.clamp(min=0)]
            # A dummy batch leaves old slots in the mapping, and a sleep leaves arbitrary ones.
            there = drafted & (slots < self._num_slots[group]) if group in self._num_slots else drafted
            by_group[group] = torch.where(there, slots, -1).flatten()
        return by_group


def _counts(rejected: Rejected) -> torch.Tensor:
    if rejected.num_rejected is not None:
        return rejected.num_rejected
    sampled, ends = rejected.sampled_token_ids, rejected.cu_num_draft_tokens
    assert sampled is not None
    assert ends is not None
    verified = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.minimum(verified, verified + 1 - (sampled != -1).sum(1))


def _read(cache: CacheRows, slots: torch.Tensor) -> torch.Tensor:
    return cache.rows[slots // cache.block_size, slots % cache.block_size].flatten(1)


def _write(cache: CacheRows, slots: torch.Tensor, content: torch.Tensor) -> None:
    rows = content.view(-1, *cache.rows.shape[2:])
    cache.rows[slots // cache.block_size, slots % cache.block_size] = rows
