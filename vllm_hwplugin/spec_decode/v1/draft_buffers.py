# SPDX-License-Identifier: Apache-2.0
"""Keep the attention metadata of captured drafter passes in tensors whose addresses never change.

A captured kernel reads the addresses that it was captured with. vLLM's eager drafter gives each pass new or re-sliced
tensors (`query_start_loc`, `seq_lens`, a slot mapping made from the new positions), and shares some of them with the
target. So a drafter in FULL graphs gets its own buffers: one set for each kind of pass, written in place before each
replay. Rows past the real batch are inert: no query tokens, sequence length 0, and slots of `PADDING_SLOT_ID`, as vLLM
pads the target's own FULL graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_hwplugin.base.features import DRAFT_FULL_GRAPH, gate_of
from vllm_hwplugin.spec_decode.decode_batch import GraphShape
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys, rows_held

# Per-request tensors on the host that a metadata builder may read. They follow the padding of the device tensors.
_HOST_ROWS = ("_seq_lens_cpu", "_num_computed_tokens_cpu", "seq_lens_cpu_upper_bound", "is_prefilling")
# Caches and per-token tensors that describe the unpadded batch. vLLM's own `unpadded()` drops them for the drafter too.
# Image ranges are also dropped: only batches without any come here, and builders treat None and an empty list alike.
_DROPPED = ("positions", "_num_computed_tokens_cache", "_token_to_req_indices_cache", "mm_req_doc_ranges")
# Device tensors that this module does not keep at a fixed address: a batch that has one runs without a FULL graph.
_UNMANAGED = ("logits_indices_padded", "encoder_seq_lens", "dcp_local_seq_lens", "rswa_prefix_lens")


def unmanaged_field(metadata: Any) -> str | None:
    """Return a field of this `CommonAttentionMetadata` without a fixed address, or None.

    A causal flag per request (a tensor, from vLLM 0.24 on) counts. So do ranges of image tokens that see each other, if
    there are any: for targets that can have them vLLM lists each request, also a request without images.
    """
    if isinstance(metadata.causal, torch.Tensor):
        return "causal"
    ranges = getattr(metadata, "mm_req_doc_ranges", None)
    if ranges is not None and any(ranges.values()):
        return "mm_req_doc_ranges"
    return next((name for name in _UNMANAGED if getattr(metadata, name, None) is not None), None)


def full_block_table(table: torch.Tensor, num_reqs: int) -> torch.Tensor:
    """Return `table` with `num_reqs` rows, out of its storage.

    `table`, int32 [batch, blocks], is the runner's persistent table sliced to the batch. No kernel reads the stale
    block ids of the rows past the batch at sequence length 0.

    Raises:
        RuntimeError: the storage behind `table` ends before that many rows.
    """
    if num_reqs <= table.shape[0]:
        return table[:num_reqs]
    if num_reqs > rows_held(table):
        raise RuntimeError(
            f"{DRAFT_FULL_GRAPH}: the drafter's block table has {table.shape[0]} rows and its storage ends before "
            f"row {num_reqs}, which a padded graph needs; set {gate_of(DRAFT_FULL_GRAPH)}=off to run without it"
        )
    return table.as_strided((num_reqs, table.shape[1]), table.stride())


class PassBuffers:
    """The buffers of one kind of pass; `query_len` is None if the pass is not uniform.

    `inert`, bool [max_reqs], are the rows past the batch that `write_even_starts` has written.
    """

    def __init__(self, max_reqs: int, query_len: int | None, device: torch.device):
        self.query_len = query_len
        self.query_start_loc = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.inert = torch.zeros(max_reqs, dtype=torch.bool, device=device)
        steps = torch.arange(max_reqs + 1, dtype=torch.int32) * (query_len or 1)
        self._steps_cpu = steps
        self._steps = steps.to(device)
        self._written: tuple[int, int] | None = None

    def write(self, metadata: Any, shape: GraphShape) -> None:
        """Copy in the rows of `metadata`; make rows up to `shape.num_reqs` inert."""
        self.write_seq_lens(metadata.seq_lens, shape.num_reqs)
        batch = metadata.num_reqs
        if self.query_len is not None:
            self.write_even_starts(batch, shape.num_reqs)
            return
        self.query_start_loc[: batch + 1].copy_(metadata.query_start_loc[: batch + 1])
        if shape.num_reqs > batch:
            self.query_start_loc[batch + 1 : shape.num_reqs + 1].fill_(metadata.num_actual_tokens)
        self._written = None

    def write_seq_lens(self, seq_lens: torch.Tensor, num_reqs: int) -> None:
        batch = seq_lens.shape[0]
        self.seq_lens[:batch].copy_(seq_lens)
        if num_reqs > batch:
            self.seq_lens[batch:num_reqs].zero_()

    def write_even_starts(self, batch: int, num_reqs: int) -> None:
        """Write `batch` requests' row starts; make rows up to `num_reqs` inert."""
        # They depend only on the two counts, and a decode batch keeps its size for many steps.
        if self._written == (batch, num_reqs):
            return
        starts = self.query_start_loc[: num_reqs + 1]
        torch.clamp(self._steps[: num_reqs + 1], max=batch * (self.query_len or 1), out=starts)
        self.inert[:batch].fill_(False)
        self.inert[batch:num_reqs].fill_(True)
        self._written = (batch, num_reqs)

    def view(self, metadata: Any, shape: GraphShape, slot_mapping: torch.Tensor) -> Any:
        """Return `metadata` over the buffers, padded to `shape`; `slot_mapping` int64 [>= num_tokens]."""
        batch, num_reqs = metadata.num_reqs, shape.num_reqs
        if self.query_len is None:
            starts_cpu = metadata.query_start_loc_cpu[: batch + 1]
            if num_reqs > batch:
                padding = starts_cpu.new_full((num_reqs - batch,), metadata.num_actual_tokens)
                starts_cpu = torch.cat([starts_cpu, padding])
        else:
            starts_cpu = torch.clamp(self._steps_cpu[: num_reqs + 1], max=batch * self.query_len)
        changes: dict[str, Any] = {
            "query_start_loc": self.query_start_loc[: num_reqs + 1],
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": self.seq_lens[:num_reqs],
            "num_reqs": num_reqs,
            "num_actual_tokens": shape.num_tokens,
            "max_query_len": self.query_len or metadata.max_query_len,
            "block_table_tensor": full_block_table(metadata.block_table_tensor, num_reqs),
            "slot_mapping": slot_mapping[: shape.num_tokens],
        }
        for name in _HOST_ROWS:
            rows = getattr(metadata, name, None)
            if rows is not None and rows.shape[0] != num_reqs:
                changes[name] = torch.cat([rows[:num_reqs], rows.new_zeros(max(0, num_reqs - rows.shape[0]))])
        for name in _DROPPED:
            if getattr(metadata, name, None) is not None:
                changes[name] = None
        return dataclasses.replace(metadata, **changes)

    def batch_for_capture(self, template: Any, shape: GraphShape, max_seq_len: int, *, causal: bool = True) -> Any:
        """Return a dummy batch that fills `shape`.

        It has the type and the block table of `template`, whose rows may be of any number.
        """
        lengths = torch.full((shape.num_reqs,), shape.num_tokens // shape.num_reqs, dtype=torch.int32)
        lengths[-1] += shape.num_tokens % shape.num_reqs
        starts = torch.zeros(shape.num_reqs + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        changes: dict[str, Any] = {
            "query_start_loc": starts.to(self.seq_lens.device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.to(self.seq_lens.device),
            "num_reqs": shape.num_reqs,
            "num_actual_tokens": shape.num_tokens,
            "max_query_len": self.query_len or shape.num_tokens,
            "max_seq_len": max_seq_len,
            "block_table_tensor": full_block_table(template.block_table_tensor, shape.num_reqs),
            "causal": causal,
        }
        for name in _HOST_ROWS:
            rows = getattr(template, name, None)
            if rows is not None:
                filled = lengths if "seq_lens" in name else torch.zeros_like(lengths)
                changes[name] = filled.to(rows.dtype)
        return dataclasses.replace(template, **changes)


class DraftBuffers:
    """Everything that the graphs of one drafter read of a batch: a `PassBuffers` for each query length.

    Args:
        table: int32 [batch, blocks], the drafter's block table as the runner gives it at capture.
        slot_mapping: int64 [tokens], the drafter's persistent slot-mapping buffer.
    """

    def __init__(self, keys: DraftKeys, table: torch.Tensor, slot_mapping: torch.Tensor, device: torch.device):
        self._table = table
        self._slot_mapping = slot_mapping
        lengths = dict.fromkeys(shape.query_len for shape in keys.all())
        self._passes = {length: PassBuffers(keys.max_num_seqs, length, device) for length in lengths}

    def of(self, shape: GraphShape) -> PassBuffers:
        """Return the buffers with which the graph of `shape` was captured."""
        return self._passes[shape.query_len]

    def view(self, metadata: Any, shape: GraphShape) -> Any:
        """Return `metadata` padded to `shape`, as a copy over the buffers."""
        return self.of(shape).view(metadata, shape, self._slot_mapping)

    def block_table_moved(self, metadata: Any) -> bool:
        """Whether the block table is not where the captured kernels read it."""
        table = metadata.block_table_tensor
        return (table.data_ptr(), table.stride(0)) != (self._table.data_ptr(), self._table.stride(0))

    def block_table(self, num_reqs: int) -> torch.Tensor:
        """Return the captured block table's leading rows, int32 [num_reqs, blocks]."""
        return full_block_table(self._table, num_reqs)

    def dummy(self, template: Any, shape: GraphShape, max_seq_len: int, *, causal: bool) -> Any:
        """Return a dummy batch's view that fills `shape`, with padding slots only."""
        buffers = self.of(shape)
        batch = buffers.batch_for_capture(template, shape, max_seq_len, causal=causal)
        buffers.write(batch, shape)
        self._slot_mapping[: shape.num_tokens].fill_(PADDING_SLOT_ID)
        return self.view(batch, shape)
