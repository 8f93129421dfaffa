# SPDX-License-Identifier: Apache-2.0
"""Draft rows of all layers: kept before a step writes them, and taken out of the KV caches if they are rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_hwplugin.nwor.layout import CacheRows
from vllm_hwplugin.ops.compile.jit import GPUS, ensure
from vllm_hwplugin.ops.compile.spec import KERNELS
from vllm_hwplugin.ops.define import define

# They have no torch reference: their table holds addresses, and where the kernels cannot be loaded :mod:`.reference`
# does the same with tensors.
define(
    "log_draft_rows(Tensor table, Tensor(a!) log, Tensor(b!) slots, Tensor query_start_loc, int num_reqs, int drafts, "
    "int word) -> ()"
)
# What is written is in no argument but by its address in the table, so the table stands for it: a compiler drops calls
# that write nothing.
define(
    "restore_draft_rows(Tensor(a!) table, Tensor? log, Tensor(b!)? slots, Tensor query_start_loc, "
    "Tensor? num_rejected, Tensor? sampled_token_ids, Tensor? cu_num_draft_tokens, int num_reqs, int drafts, "
    "int word) -> ()"
)


@dataclass(frozen=True)
class Batch:
    """What a step's batch is read from: tensors on the device that stay where they are.

    Attributes:
        query_start_loc: [at least max_num_reqs + 1] int32: where each request's tokens begin, and the end of the last.
        slot_mappings: by KV cache group [tokens] int64: where each token of the batch is written; -1 for nowhere.
        max_num_reqs: requests of the largest batch.
        drafts: how many drafts a request has at most.
    """

    query_start_loc: torch.Tensor
    slot_mappings: Mapping[int, torch.Tensor]
    max_num_reqs: int
    drafts: int


@dataclass(frozen=True)
class Rejected:
    """How many drafts of each request were rejected, as the device has it: by number, or by what was sampled.

    Attributes:
        num_rejected: [requests] int32.
        sampled_token_ids: [requests, sampled] int32: the accepted drafts and one token more, then -1.
        cu_num_draft_tokens: [requests] int32: drafts that were verified, up to and with each request.
    """

    num_rejected: torch.Tensor | None = None
    sampled_token_ids: torch.Tensor | None = None
    cu_num_draft_tokens: torch.Tensor | None = None

    @property
    def num_reqs(self) -> int:
        tensor = self.sampled_token_ids if self.num_rejected is None else self.num_rejected
        assert tensor is not None
        return int(tensor.shape[0])


class DraftRows(Protocol):
    """The last drafts of each request are its draft rows: row ``request * drafts + j`` is its token ``drafts - j`` from
    the end. A request's first token is never a draft, so it has no more rows than tokens less one.

    Neither method waits for the device, and both can be captured in a CUDA graph.
    """

    def log(self, num_reqs: int) -> None:
        """Keep what the caches hold where the drafts of so many requests will be written, and where that is."""

    def restore(self, rejected: Rejected) -> None:
        """Put back what was kept of rejected drafts; if nothing is kept, write zeros. What was kept is used up.

        Their slots become -1, so that a drafter whose first pass reads them does not write these tokens either.
        """

    @property
    def num_bytes(self) -> int:
        """Device memory that is held."""


class KernelRows:
    """Two kernels, one launch each for all layers. See :class:`DraftRows`.

    It holds addresses of the caches and not the tensors.

    Args:
        caches: of the layers; on one GPU.
        batch: of the runner.
        keep: whether what is overwritten is kept.
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
            # Each layer's bytes begin where whole words do.
            offset += -(-cache.num_bytes // 16) * 16
        # Of groups that the drafter has for itself the slots alone are of interest.
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
        torch.ops.hwplugin.log_draft_rows(
            self._table, self._log, self._slots, self._batch.query_start_loc, num_reqs, self._batch.drafts, self._word
        )

    def restore(self, rejected: Rejected) -> None:
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
        held = (self._table, self._log, self._slots)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)


def kernels_for(device: torch.device) -> bool:
    """Whether the kernels serve a device; the first call may run a compiler."""
    return device.type in GPUS and all(
        ensure(kernel) for kernel in (KERNELS["log_draft_rows"], KERNELS["restore_draft_rows"])
    )


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """What kernels read as int32: the samplers of vLLM have it so, but for batches that were sharded and gathered."""
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32)
