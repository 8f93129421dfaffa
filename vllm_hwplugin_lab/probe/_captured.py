# SPDX-License-Identifier: Apache-2.0
"""A batch captured in a CUDA graph, and other batches run by replays of it, as vLLM's model runner does it.

The graph holds what a FULL graph of vLLM holds of a layer: the cache update of the new tokens, and attention. It is
captured on a dummy batch that fills all rows, with the bounds that the runner announces then; before each replay the
builder builds the new batch's metadata, which only what it keeps in buffers of its own reaches the graph by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from vllm_hwplugin.attention.flash import captures_short_queries

from ._cases import Case, Request
from ._inputs import Inputs, make_inputs, poison
from ._reference import Measure
from ._trial import refusals
from ._vllm import MAX_MODEL_LEN, Batch, Layer, Maker, batch_of, ends, last, lengths, measured, metadata_of


def run(maker: Maker, case: Case) -> list[Measure]:
    """Capture a case's rows and replay each of its batches.

    Args:
        maker: of the layer.
        case: with a ``graph``.

    Raises:
        Refused: the backend cannot be captured.
    """
    turns = [
        dataclasses.replace(case, requests=requests, padding=len(case.graph) - len(requests), seed=case.seed + turn)
        for turn, requests in enumerate((case.requests, *case.replays))
    ]
    contents = [make_inputs(turn, maker.device) for turn in turns]
    num_blocks = max(one.num_blocks for one in contents)
    columns = max(one.block_table.shape[1] for one in contents)
    found = []
    with maker.layer(case, contents[0], num_blocks) as layer:
        static = _Static(case, maker.device, columns)
        with refusals():
            replay = capture(lambda: static.build(layer), lambda metadata: static.step(layer, metadata))
        for turn, inputs in zip(turns, contents, strict=True):
            with refusals():
                poison(layer.cache, turn.seed)
                if any(request.context for request in turn.requests):
                    layer.write(*(torch.cat(tensors) for tensors in _contexts(turn, inputs)))
                static.fill(layer, turn, inputs)
                replay()
                output = static.output[: turn.num_tokens].clone()
            found.append(measured(turn, inputs, output, layer.rounds_query))
    return found


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


class _Static:
    """The tensors that a graph reads and writes, at addresses that stay."""

    def __init__(self, case: Case, device: Any, columns: int) -> None:
        rows, tokens = len(case.graph), sum(case.graph)
        dtype = getattr(torch, case.dtype)

        def zeros(*shape: int, dtype: Any = torch.int32) -> Any:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.case = case
        self.query = zeros(tokens, case.num_heads, case.head_size, dtype=dtype)
        self.keys = zeros(tokens, case.num_kv_heads, case.head_size, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.output = torch.zeros_like(self.query)
        self.batch = Batch(
            query_start_loc=zeros(rows + 1),
            seq_lens=zeros(rows),
            block_table=zeros(rows, columns),
            slots=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
        )

    def build(self, layer: Layer) -> Any:
        """Metadata of a dummy batch without context, whose tokens go nowhere; its bounds are those of any batch."""
        dummy = dataclasses.replace(
            self.case, requests=tuple(Request(query, 0) for query in self.case.graph), padding=0
        )
        self.batch.query_start_loc.copy_(ends(dummy))
        self.batch.seq_lens.copy_(lengths(dummy))
        self.batch.slots.fill_(-1)
        return layer.builder.build_for_cudagraph_capture(
            metadata_of(dummy, self.batch, max_query_len=self._announced(layer), max_seq_len=MAX_MODEL_LEN)
        )

    def _announced(self, layer: Layer) -> int:
        """The longest query of a captured batch, as the model runner of the layer's configuration announces it."""
        uniform = self.case.graph[0] > 1 or all(request.query == 1 for request in self.case.requests)
        if uniform or captures_short_queries(layer.config):
            return max(self.case.graph)
        return sum(self.case.graph)

    def step(self, layer: Layer, metadata: Any) -> None:
        layer.write(self.keys, self.values, self.batch.slots)
        layer.forward(self.query, self.keys, self.values, metadata, self.output)

    def fill(self, layer: Layer, turn: Case, inputs: Inputs) -> None:
        """Put another batch in place."""
        new, tokens = batch_of(turn, inputs, self.output.device), turn.num_tokens
        self.batch.query_start_loc.copy_(new.query_start_loc)
        self.batch.seq_lens.copy_(new.seq_lens)
        # What is left in the further columns belongs to the batch before.
        self.batch.block_table[:, : new.block_table.shape[1]] = new.block_table
        self.batch.slots.fill_(-1)[:tokens] = new.slots
        self.batch.positions.zero_()[:tokens] = new.positions
        self.query.zero_()[:tokens] = inputs.query
        self.keys.zero_()[:tokens] = last(inputs.keys, turn.requests)
        self.values.zero_()[:tokens] = last(inputs.values, turn.requests)
        self.output.fill_(math.nan)
        layer.builder.build(0, metadata_of(turn, self.batch))


def _contexts(turn: Case, inputs: Inputs) -> tuple[tuple[Any, ...], ...]:
    """Keys, values and slots of what is in the cache before the step."""
    return tuple(
        tuple(tensor[: request.context] for tensor, request in zip(tensors, turn.requests, strict=True))
        for tensors in (inputs.keys, inputs.values, inputs.slots)
    )
