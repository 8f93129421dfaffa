# SPDX-License-Identifier: Apache-2.0
"""Draft rows of all layers: saved before a step overwrites them, restored in the KV caches if drafts are rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_hwplugin.nwor.layout import CacheRows
from vllm_hwplugin.ops.compile.jit import GPUS, ensure
from vllm_hwplugin.ops.compile.spec import KERNELS
from vllm_hwplugin.ops.define import define

# Without a PyTorch implementation, because their table holds addresses. :mod:`.reference` does the same with tensors.
define(
    "log_draft_rows(Tensor table, Tensor(a!) log, Tensor(b!) slots, Tensor query_start_loc, int num_reqs, int drafts, "
    "int word) -> ()"
)
# A compiler drops calls that write nothing, and the table only has addresses of what is written: so it is declared as
# written.
define(
    "restore_draft_rows(Tensor(a!) table, Tensor? log, Tensor(b!)? slots, Tensor query_start_loc, "
    "Tensor? num_rejected, Tensor? sampled_token_ids, Tensor? cu_num_draft_tokens, int num_reqs, int drafts, "
    "int word) -> ()"
)


@dataclass(frozen=True)
class Batch:
    """Device tensors that describe a step's batch and never move.

    Attributes:
        query_start_loc: [at least max_num_reqs + 1] int32: start of each request's tokens, and the end of the last.
        slot_mappings: by KV cache group [tokens] int64: the slot of each token of the batch, -1 for none.
        max_num_reqs: of the largest batch.
        drafts: most drafts of a request.
    """

    query_start_loc: torch.Tensor
    slot_mappings: Mapping[int, torch.Tensor]
    max_num_reqs: int
    drafts: int


@dataclass(frozen=True)
class Rejected:
    """The rejected drafts of each request on the device: as counts, or as sampled tokens.

    Attributes:
        num_rejected: [requests] int32.
        sampled_token_ids: [requests, sampled] int32: the accepted drafts and one more token, then -1.
        cu_num_draft_tokens: [requests] int32: cumulative number of verified drafts.
    """

    num_rejected: torch.Tensor | None = None
    sampled_token_ids: torch.Tensor | None = None
    cu_num_draft_tokens: torch.Tensor | None = None

    @property
    def num_reqs(self) -> int:
        tensor = self.sampled_token_ids if self.num_rejected is None else self.num_rejected
        assert tensor is not None
        return int(tensor.shape[0])


class KernelRows:
    """Saves and restores draft rows: row ``request * drafts + j`` is the request's token ``drafts - j`` from the end.

    A request's first token is never a draft. No method waits for the device, and a CUDA graph can capture them all. Two
    kernels do it, one launch each for all layers on one GPU; they read the caches by address.
    """

    def __init__(self, caches: Sequence[CacheRows], batch: Batch, keep: bool):
        self._batch = batch
        self._word = min(cache.word for cache in caches)
        lines: list[list[int]] = []
        offset = 0
        for cache in caches:
            blocks, tokens, outer, inner, _ = cache.rows.stride()
            _, block_size, num_outer, num_inner, run = cache.rows.shape
            slots = batch.slot_mappings[cache.group]
            lines.append(
                [
                    *(cache.rows.data_ptr(), slots.data_ptr(), block_size, blocks, tokens),
                    *(num_outer, outer, num_inner, inner, run, offset, cache.num_slots),
                ]
            )
            # Each layer's bytes begin at a 16-byte boundary.
            offset += -(-cache.num_bytes // 16) * 16
        # Only the drafter uses the other groups: their slots are updated, not their caches.
        others = batch.slot_mappings.keys() - {cache.group for cache in caches}
        any_slot = torch.iinfo(torch.int64).max
        lines += [[0, batch.slot_mappings[group].data_ptr(), 1, *[0] * 8, any_slot] for group in sorted(others)]
        device = batch.query_start_loc.device
        self._table = torch.tensor(lines, dtype=torch.int64, device=device)
        self._log: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        if keep:
            rows = batch.max_num_reqs * batch.drafts
            self._log = torch.empty((rows, offset), dtype=torch.uint8, device=device)
            self._slots = torch.full((len(lines), rows), -1, dtype=torch.int64, device=device)

    def log(self, num_reqs: int) -> None:
        """Save what drafts of `num_reqs` requests will overwrite."""
        torch.ops.hwplugin.log_draft_rows(
            self._table, self._log, self._slots, self._batch.query_start_loc, num_reqs, self._batch.drafts, self._word
        )

    def restore(self, rejected: Rejected) -> None:
        """Restore rejected drafts' bytes, or zero them; set their slots to -1.

        The saved bytes are consumed. Without slots a drafter's first pass does not write these tokens again.
        """
        torch.ops.hwplugin.restore_draft_rows(
            self._table,
            self._log,
            self._slots,
            self._batch.query_start_loc,
            rejected.num_rejected,
            rejected.sampled_token_ids,
            rejected.cu_num_draft_tokens,
            rejected.num_reqs,
            self._batch.drafts,
            self._word,
        )

    @property
    def num_bytes(self) -> int:
        """Device memory in bytes."""
        held = (self._table, self._log, self._slots)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def kernels_for(device: torch.device) -> bool:
    """Whether the kernels run on a device; may compile them."""
    return device.type in GPUS and all(
        ensure(kernel) for kernel in (KERNELS["log_draft_rows"], KERNELS["restore_draft_rows"])
    )


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Return int32 for the kernels; only gathered sharded batches need the conversion."""
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32)
