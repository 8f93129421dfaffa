# SPDX-License-Identifier: Apache-2.0
"""A layer's step over a batch as vLLM's model runner makes it, launched or replayed from a CUDA graph."""

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
    """A layer's step for batches of one size: the cache update of the new tokens, and attention.

    Its tensors keep their addresses. With ``case.graph`` the step is captured as vLLM's model runner captures a FULL
    graph: on a dummy batch that fills all rows, with the runner's bounds. Before each replay the builder builds the new
    batch's metadata; it reaches the graph only through the builder's persistent buffers.

    Args:
        case: A batch of that size, or a case with a ``graph``.
        columns: Columns of the widest block table.

    Raises:
        Exception: The backend cannot be captured.
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
        """Return an uncached batch's output: ``[num_tokens, num_heads, head_size]``."""

        def parts(tensors: tuple[Any, ...], *, new: bool) -> Any:
            pairs = zip(tensors, case.requests, strict=True)
            return torch.cat([tensor[row.context :] if new else tensor[: row.context] for tensor, row in pairs])

        cached = inputs.keys, inputs.values, inputs.slots
        if any(request.context for request in case.requests):
            self._layer.write(*(parts(tensors, new=False) for tensors in cached))
        keys, values, slots = (parts(tensors, new=True) for tensors in cached)
        positions = torch.cat([torch.arange(request.context, request.total) for request in case.requests])
        # Other columns, and tokens after the batch, keep values of the previous batch, as in vLLM.
        self._table[:, : inputs.block_table.shape[1]] = inputs.block_table
        self._slots.fill_(-1)
        static = self._slots, self._positions, self._query, self._keys, self._values
        for buffer, content in zip(static, (slots, positions, inputs.query, keys, values), strict=True):
            buffer[: case.num_tokens] = content
        self._output.fill_(math.nan)
        metadata = self._layer.builder.build(0, self._metadata(case))
        if self._replay is None:
            self._step(metadata)
        else:
            self._replay()
        return self._output[: case.num_tokens].clone()

    def _dummy(self, case: Case) -> Any:
        """Return metadata of a dummy batch with the bounds of any batch."""
        # The batch has no context and no slots.
        dummy = dataclasses.replace(case, requests=tuple(Request(query, 0) for query in case.graph), padding=0)
        self._slots.fill_(-1)
        bounds = {"max_query_len": announced(case, self._layer.config), "max_seq_len": MAX_MODEL_LEN}
        return self._layer.builder.build_for_cudagraph_capture(self._metadata(dummy, **bounds))

    def _metadata(self, case: Case, **bounds: int) -> Any:
        """Return the runner's metadata; ``bounds`` replace the batch's own."""
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
        # The fields differ between versions.
        known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})

    def _step(self, metadata: Any) -> None:
        self._layer.write(self._keys, self._values, self._slots)
        self._layer.forward(self._query, self._keys, self._values, metadata, self._output)


def announced(case: Case, config: Any) -> int:
    """Return the longest query that the runner announces for a capture."""
    uniform = case.graph[0] > 1 or all(request.query == 1 for request in case.requests)
    return max(case.graph) if uniform or captures_short_queries(config) else sum(case.graph)


def capture(build: Callable[[], Any], step: Callable[[Any], None]) -> Callable[[], None]:
    """Run a step once, capture it, and return its replay.

    Args:
        build: Makes the metadata of a run, outside of the graph.
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
