# SPDX-License-Identifier: Apache-2.0
"""What the graphs of a step's tail read and write, at addresses that never change.

Model Runner V2 makes most of a batch's small tensors anew in each step, and its sampling parameters move between two
host buffers. A decode batch of requests with equally many tokens needs none of that: all but the requests' rows in the
runner's state follow from their number. So the rows are kept here, and written when other requests are decoded than in
the step before.

A batch may have fewer requests than the graph. The surplus requests, *padding*, take a row that no request has: their
results go where nobody reads. `Padding` says what keeps them out of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Padding:
    """Which requests of a graph are padding, on the device.

    Attributes:
        alive: [num_reqs], int32: 1, or 0 for padding.
        query_start_loc: [num_reqs + 1], int32: of one query token a request; padding has none.
        block_start_loc: [num_reqs + 1], int32: of 1 + num_speculative_tokens query tokens a request.
        dead_tokens: [num_reqs * (1 + num_speculative_tokens)], bool: the query tokens of padding.
    """

    alive: torch.Tensor
    query_start_loc: torch.Tensor
    block_start_loc: torch.Tensor
    dead_tokens: torch.Tensor


@dataclass(frozen=True)
class Outputs:
    """What sampling leaves, on the device, at the addresses that drafting and the copy to the host read.

    Attributes:
        sampled_token_ids: [max_num_reqs, 1 + num_speculative_tokens], int64.
        num_sampled: [max_num_reqs], int32.
        num_rejected: [max_num_reqs], int32.
    """

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor


class TailBuffers:
    """The buffers of one runner's tail graphs.

    Args:
        runner: a `GPUModelRunner` of Model Runner V2 that has its KV cache.
        max_num_reqs: of the largest graph.
        query_len: tokens of a request in a decode batch, 1 + num_speculative_tokens.
        idx_dtype: what the runner's `idx_mapping` is made of.
    """

    def __init__(self, runner: Any, max_num_reqs: int, query_len: int, idx_dtype: torch.dtype):
        self._runner = runner
        self.query_len = query_len
        device = runner.device
        self._rows = torch.zeros(2, max_num_reqs, dtype=idx_dtype, device=device)
        # Of `_Layout`, which is written to the device in one copy.
        self._layout = torch.zeros(3 * (max_num_reqs + 1), dtype=torch.int32, device=device)
        self._dead_tokens = torch.ones(max_num_reqs, query_len, dtype=torch.bool, device=device)
        self.start_loc = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device) * query_len
        tokens = torch.arange(max_num_reqs * query_len, device=device)
        self.logits_indices = tokens
        self.local_pos = (tokens % query_len).to(torch.int32)
        self.outputs = Outputs(
            torch.zeros(max_num_reqs, query_len, dtype=torch.int64, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        )
        states = runner.sampler.sampling_states
        self._moving = (states.temperature, states.top_k, states.top_p, states.seeds, runner.req_states.prefill_len)
        self._fixed = tuple(torch.empty_like(one.gpu, device=device) for one in self._moving)
        self.temperature, _, _, self.seeds, _ = self._fixed
        self._max_num_reqs = max_num_reqs

    def idx_mapping(self, num_reqs: int) -> torch.Tensor:
        """[num_reqs]: each request's row in the runner's state; padding has one that no request has."""
        return self._rows[0, :num_reqs]

    def idx_mapping_alive(self, num_reqs: int) -> torch.Tensor:
        """[num_reqs]: the same with -1 for padding, which `post_update` passes over."""
        return self._rows[1, :num_reqs]

    def padding(self, num_reqs: int) -> Padding:
        """Of a graph of `num_reqs` requests."""
        stride = self._max_num_reqs + 1
        alive, query, block = (self._layout[i * stride : (i + 1) * stride] for i in range(3))
        return Padding(
            alive[:num_reqs],
            query[: num_reqs + 1],
            block[: num_reqs + 1],
            self._dead_tokens.view(-1)[: num_reqs * self.query_len],
        )

    def write(self, rows: np.ndarray, free_row: int) -> None:
        """Have these requests in the graphs, each at the row given.

        Args:
            rows: [number of requests], integers.
            free_row: of padding.
        """
        count, most = len(rows), self._max_num_reqs
        dtype = np.int64 if self._rows.dtype == torch.int64 else np.int32
        both: Any = np.full((2, most), -1, dtype=dtype)
        both[0] = free_row
        both[:, :count] = rows
        _copy(both, self._rows)
        layout: Any = np.empty((3, most + 1), dtype=np.int32)
        layout[0] = np.arange(most + 1) < count
        layout[1] = np.minimum(np.arange(most + 1), count)
        layout[2] = layout[1] * self.query_len
        _copy(layout.reshape(-1), self._layout)
        self._dead_tokens.copy_((self.padding(most).alive == 0)[:, None])
        self.write_parameters()

    def write_parameters(self) -> None:
        """Take over the sampling parameters of all requests, and the lengths of their prompts."""
        for fixed, moving in zip(self._fixed, self._moving, strict=True):
            fixed.copy_(moving.gpu, non_blocking=True)

    def stand_in(self) -> StandIn:
        """A context in which vLLM's sampler reads the fixed parameters."""
        return StandIn(self._moving, self._fixed)


def _copy(values: np.ndarray, out: torch.Tensor) -> None:
    # A copy that does not wait needs pinned memory, which torch keeps until the copy is done.
    out.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


class StandIn:
    """While it lasts, vLLM's `UvaBackedTensor`s give out other tensors as `gpu`.

    Such a tensor gives out another of its host buffers after each change; a graph would not follow.
    """

    def __init__(self, moving: tuple[Any, ...], fixed: tuple[torch.Tensor, ...]):
        self._moving, self._fixed = moving, fixed
        self._before: tuple[torch.Tensor, ...] = ()

    def __enter__(self) -> None:
        self._before = tuple(one.gpu for one in self._moving)
        for one, fixed in zip(self._moving, self._fixed, strict=True):
            one.gpu = fixed

    def __exit__(self, *failure: object) -> None:
        for one, before in zip(self._moving, self._before, strict=True):
            one.gpu = before
