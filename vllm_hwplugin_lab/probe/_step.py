# SPDX-License-Identifier: Apache-2.0
"""A layer's step over batches as vLLM's model runner makes them, launched or replayed from a CUDA graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_hwplugin.attention.flash import captures_short_queries

from ._cases import Case, Request
from ._vllm import MAX_MODEL_LEN, Layer
from .inputs import Inputs


class Step:
    """What a layer does in a step of batches of one size: the cache update of the new tokens, and attention.

    Its tensors stay at their addresses. With ``case.graph`` the step is captured as vLLM's model runner captures a FULL
    graph: on a dummy batch that fills all rows, with the bounds that the runner announces then. Before each replay the
    builder builds the new batch's metadata, which only what it keeps in buffers of its own reaches the graph by.

    Args:
        layer: whose cache is written and read.
        case: one of the batches, or with a ``graph``.
        columns: of the widest block table.
        place: the device.

    Raises:
        Exception: the backend cannot be captured.
    """

    def __init__(self, layer: Layer, case: Case, columns: int, place: Any) -> None:
        rows, tokens = (len(case.graph), sum(case.graph)) if case.graph else (len(case.rows), case.num_tokens)
        dtype = getattr(torch, case.dtype)

        def zeros(*shape: int, dtype: Any = torch.int32) -> Any:
            return torch.zeros(*shape, dtype=dtype, device=place)

        self._layer = layer
        self._query = zeros(tokens, case.num_heads, case.head_size, dtype=dtype)
        self._keys = zeros(tokens, case.num_kv_heads, case.head_size, dtype=dtype)
        self._values = torch.zeros_like(self._keys)
        self._output = torch.zeros_like(self._query)
        self._starts, self._lengths, self._table = zeros(rows + 1), zeros(rows), zeros(rows, columns)
        self._slots, self._positions = zeros(tokens, dtype=torch.int64), zeros(tokens, dtype=torch.int64)
        self._replay = capture(lambda: self._dummy(case), self._step) if case.graph else None

    def run(self, case: Case, inputs: Inputs) -> Any:
        """The output of a batch that is in no cache yet: ``[num_tokens, num_heads, head_size]``."""

        def parts(tensors: tuple[Any, ...], *, new: bool) -> Any:
            pairs = zip(tensors, case.requests, strict=True)
            return torch.cat([one[row.context :] if new else one[: row.context] for one, row in pairs])

        cached = inputs.keys, inputs.values, inputs.slots
        if any(request.context for request in case.requests):
            self._layer.write(*(parts(tensors, new=False) for tensors in cached))
        keys, values, slots = (parts(tensors, new=True) for tensors in cached)
        positions = torch.cat([torch.arange(request.context, request.total) for request in case.requests])
        # What is left in the further columns, and in the tokens beyond, belongs to the batch before.
        self._table[:, : inputs.block_table.shape[1]] = inputs.block_table
        self._slots.fill_(-1)
        static = self._slots, self._positions, self._query, self._keys, self._values
        for one, own in zip(static, (slots, positions, inputs.query, keys, values), strict=True):
            one[: case.num_tokens] = own
        self._output.fill_(math.nan)
        metadata = self._layer.builder.build(0, self._metadata(case))
        if self._replay is None:
            self._step(metadata)
        else:
            self._replay()
        return self._output[: case.num_tokens].clone()

    def _dummy(self, case: Case) -> Any:
        """Metadata of a dummy batch without context, whose tokens go nowhere; its bounds are those of any batch."""
        dummy = dataclasses.replace(case, requests=tuple(Request(query, 0) for query in case.graph), padding=0)
        self._slots.fill_(-1)
        bounds = {"max_query_len": announced(case, self._layer.config), "max_seq_len": MAX_MODEL_LEN}
        return self._layer.builder.build_for_cudagraph_capture(self._metadata(dummy, **bounds))

    def _metadata(self, case: Case, **bounds: int) -> Any:
        """What the model runner hands to metadata builders, with the bounds that it announces if not the batch's."""
        ends = torch.tensor([0, *(row.query for row in case.rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([row.total for row in case.rows], dtype=torch.int32)
        self._starts.copy_(ends)
        self._lengths.copy_(lengths)
        given = {
            "query_start_loc": self._starts,
            "query_start_loc_cpu": ends,
            "seq_lens": self._lengths,
            "num_reqs": len(case.rows),
            "num_actual_tokens": len(self._slots),
            "max_query_len": max(row.query for row in case.rows),
            "max_seq_len": max(row.total for row in case.rows),
            "block_table_tensor": self._table,
            "slot_mapping": self._slots,
            "causal": case.causal,
            "positions": self._positions,
            "seq_lens_cpu_upper_bound": lengths,
            "_seq_lens_cpu": lengths,
            "_num_computed_tokens_cpu": torch.tensor([row.context for row in case.rows], dtype=torch.int32),
            **bounds,
        }
        # Each version has other fields.
        known = {one.name for one in dataclasses.fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})

    def _step(self, metadata: Any) -> None:
        self._layer.write(self._keys, self._values, self._slots)
        self._layer.forward(self._query, self._keys, self._values, metadata, self._output)


def announced(case: Case, config: Any) -> int:
    """The longest query of a captured batch, as the model runner of a configuration announces it."""
    uniform = case.graph[0] > 1 or all(request.query == 1 for request in case.requests)
    return max(case.graph) if uniform or captures_short_queries(config) else sum(case.graph)


def capture(build: Callable[[], Any], step: Callable[[Any], None]) -> Callable[[], None]:
    """Capture a step after it has run once; returns what replays it.

    Args:
        build: makes the metadata of a run, outside of the graph.
        step: is captured.
    """
    step(build())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    metadata = build()
    with torch.cuda.graph(graph):
        step(metadata)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay
