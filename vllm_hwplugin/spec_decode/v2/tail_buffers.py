# SPDX-License-Identifier: Apache-2.0
"""Fixed-address buffers of the sampling and drafting graphs (Model Runner V2).

V2 allocates most of a batch's small tensors again in each step, and its sampling parameters move between two host
buffers. A decode batch with equal token counts needs only its requests' rows in the runner's state: the rest follows
from the number of requests. So the buffers are written when the requests differ from the previous step's. For any other
batch they are written in each step, together with the positions of its logits; with adaptive verification only the
device has these. Surplus requests of a graph, *padding*, take a row that no request has, so nothing reads their
results, and `Padding` keeps them out of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Padding:
    """Which requests of a graph are padding, on the device."""

    #: [num_reqs], int32: 1, or 0 for padding.
    alive: torch.Tensor
    #: [num_reqs + 1], int32: for one query token per request; padding has none.
    query_start_loc: torch.Tensor
    #: [num_reqs + 1], int32: for the target's query tokens, equally many per request.
    block_start_loc: torch.Tensor
    #: [num_reqs * the target's query tokens of a request], bool: whether a token is padding's.
    dead_tokens: torch.Tensor
    #: [tokens of a mixed batch], bool: the same in such a batch; None in a decode batch.
    dead_mixed: torch.Tensor | None = None


@dataclass(frozen=True)
class Outputs:
    """Sampling's results on the device, where drafting and the copy to the host read them."""

    sampled_token_ids: torch.Tensor  # [max_num_reqs, 1 + num_speculative_tokens], int64.
    num_sampled: torch.Tensor  # [max_num_reqs], int32.
    num_rejected: torch.Tensor  # [max_num_reqs], int32.


@dataclass(frozen=True)
class LogitsRows:
    """The rows of vLLM's `InputBatch` that logits are computed for: the last tokens of each request."""

    batch: Any
    #: Whether the graph's hidden states are only these rows, not all tokens.
    gathered: bool
    #: [number of requests]: rows of each request; None: only the device has the batch's draft counts.
    num_logits: np.ndarray | None


class Packed:
    """Tensors of several dtypes in one allocation that one copy from the host fills.

    Args:
        parts: name -> (shape, dtype).

    Attributes:
        host: name -> array that the next copy reads.
        device: name -> tensor.
    """

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        places, size = {}, 0
        for name, (shape, dtype) in parts.items():
            places[name] = size, size + math.prod(shape) * dtype.itemsize
            # Triton specializes kernels for addresses that are multiples of 16.
            size = -(-places[name][1] // 16) * 16
        self._host = torch.zeros(size, dtype=torch.uint8)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        on_host, self.device = (
            {name: whole[slice(*places[name])].view(dtype).view(shape) for name, (shape, dtype) in parts.items()}
            for whole in (self._host, self._device)
        )
        self.host = {name: tensor.numpy() for name, tensor in on_host.items()}

    def copy(self) -> None:
        # An asynchronous copy needs pinned memory. Torch keeps the memory until the copy is done.
        self._device.copy_(self._host.pin_memory(), non_blocking=True)


class TailBuffers:
    """The buffers of one runner's sampling and drafting graphs.

    Args:
        runner: a `GPUModelRunner` that has its KV cache.
        max_num_reqs: requests of the largest graph.
        query_len: 1 + num_speculative_tokens, the most tokens of a request in a decode batch.
        idx_dtype: dtype of the runner's `idx_mapping`.
        chunk_rows: rows of logits that are sampled at a time, a power of two. A chunk holds whole requests, and has
            space for `query_len` rows per request.
    """

    def __init__(self, runner: Any, max_num_reqs: int, query_len: int, idx_dtype: torch.dtype, chunk_rows: int):
        self._chunk_rows = chunk_rows
        device, num_tokens = runner.device, max_num_reqs * query_len
        states = runner.sampler.sampling_states
        self._moving = {
            "temperature": states.temperature,
            "top_k": states.top_k,
            "top_p": states.top_p,
            "seeds": states.seeds,
            "prefill_len": runner.req_states.prefill_len,
        }
        self._packed = Packed(
            {
                "rows": ((max_num_reqs,), idx_dtype),
                "rows_alive": ((max_num_reqs,), idx_dtype),
                "cu_num_logits": ((max_num_reqs + 1,), torch.int32),
                "expanded_rows": ((num_tokens,), idx_dtype),
                "local_pos": ((num_tokens,), torch.int32),
                "logits_indices": ((num_tokens,), torch.int64),
                "hidden_rows": ((num_tokens,), torch.int64),
                "alive": ((max_num_reqs,), torch.int32),
                "query_start_loc": ((max_num_reqs + 1,), torch.int32),
                "block_start_loc": ((max_num_reqs + 1,), torch.int32),
                "dead_tokens": ((num_tokens,), torch.bool),
                **{name: (moving.np.shape, moving.gpu.dtype) for name, moving in self._moving.items()},
            },
            device,
        )
        written = self._packed.device
        self._fixed = tuple(written[name] for name in self._moving)
        self._tokens = np.arange(num_tokens)
        # [max_num_reqs of the runner].
        self.temperature, self.seeds = written["temperature"], written["seeds"]
        # `cu_num_logits`: [max_num_reqs + 1], int32, rows of logits before each request. The others have
        # [max_num_reqs * query_len] items. For each row of logits: its request's row in the runner's state
        # (`expanded_idx_mapping`), its position among the request's rows (`local_pos`), its token in the batch
        # (`logits_indices`), and its row in the graph's hidden states (`hidden_rows`, int64). The rows of a chunk's
        # requests are contiguous; the space after them belongs to no request.
        self.cu_num_logits, self.expanded_idx_mapping = written["cu_num_logits"], written["expanded_rows"]
        self.local_pos, self.logits_indices = written["local_pos"], written["logits_indices"]
        self.hidden_rows = written["hidden_rows"]
        self.outputs = Outputs(
            torch.zeros(max_num_reqs, query_len, dtype=torch.int64, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        )

    def chunk_reqs(self, query_len: int) -> int:
        """Return how many requests of `query_len` tokens are sampled at a time."""
        # A multiple of 16 if 16 fit: Triton compiles other kernels for addresses that are no multiples of 16.
        most = max(1, self._chunk_rows // query_len)
        return most // 16 * 16 or most

    def idx_mapping(self, num_reqs: int) -> torch.Tensor:
        """Return each request's row in the runner's state, [num_reqs]."""
        return self._packed.device["rows"][:num_reqs]

    def idx_mapping_alive(self, num_reqs: int) -> torch.Tensor:
        """Return `idx_mapping` with -1 for padding, which `post_update` skips."""
        return self._packed.device["rows_alive"][:num_reqs]

    def padding(self, num_reqs: int, query_len: int) -> Padding:
        """Return a graph's padding, for `num_reqs` requests of `query_len` tokens."""
        written = self._packed.device
        return Padding(
            written["alive"][:num_reqs],
            written["query_start_loc"][: num_reqs + 1],
            written["block_start_loc"][: num_reqs + 1],
            written["dead_tokens"][: num_reqs * query_len],
        )

    def write(self, rows: np.ndarray, free_row: int, query_len: int, logits: LogitsRows | None = None) -> None:
        """Write the requests' rows, parameters and prompt lengths into the buffers.

        Args:
            rows: [number of requests], integers: rows in the runner's state.
            free_row: padding's row.
            query_len: tokens of a request in the graphs.
            logits: positions of at most `query_len` rows of logits per request. None: a row for each token. Rows on the
                device are written for a graph that samples all its requests at a time; padding has none of them.
        """
        host, count = self._packed.host, len(rows)
        most, tokens = len(host["rows"]), self._tokens
        host["rows"][:count], host["rows"][count:] = rows, free_row
        host["rows_alive"][:count], host["rows_alive"][count:] = rows, -1
        host["alive"][:count], host["alive"][count:] = 1, 0
        np.minimum(np.arange(most + 1), count, out=host["query_start_loc"])
        np.multiply(host["query_start_loc"], query_len, out=host["block_start_loc"])
        host["dead_tokens"][:] = tokens >= count * query_len

        for name, moving in self._moving.items():
            host[name][:] = moving.np
        for name, rest in (("expanded_rows", free_row), ("local_pos", 0), ("logits_indices", 0), ("hidden_rows", 0)):
            host[name][:] = rest
        if logits is not None and logits.num_logits is None:
            self._write_from_device(logits)
        else:
            self._place(count, query_len, logits)
            self._packed.copy()

    def _place(self, count: int, query_len: int, logits: LogitsRows | None) -> None:
        """Put each request's rows of logits into its chunk."""
        host, tokens = self._packed.host, self._tokens
        most = len(host["rows"])
        num_logits: Any = np.full(most, query_len if logits is None else 1)
        if logits is not None:
            num_logits[:count] = logits.num_logits
        ends = host["cu_num_logits"][1:]
        np.cumsum(num_logits, out=ends)
        # For each row of logits: its request, and its place. Places between belong to no request.
        request: Any = np.repeat(np.arange(most), num_logits)
        row, starts = tokens[: len(request)], host["cu_num_logits"]
        chunk_reqs = self.chunk_reqs(query_len)
        first: Any = request // chunk_reqs * chunk_reqs
        place = first * query_len + row - starts[first]
        host["expanded_rows"][place] = host["rows"][request]
        host["local_pos"][place] = row - starts[request]
        last: Any = ends
        if logits is not None:
            last = np.ones(most, dtype=np.int64)
            last[:count] = logits.batch.query_start_loc_np[1 : 1 + count]
        host["logits_indices"][place] = row + (last - ends)[request]
        host["hidden_rows"][place] = row if logits is None or logits.gathered else host["logits_indices"][place]

    def _write_from_device(self, logits: LogitsRows) -> None:
        """Copy the rows of logits, which vLLM has put one behind another."""
        host, batch, written = self._packed.host, logits.batch, self._packed.device
        num_logits = len(batch.logits_indices)
        host["cu_num_logits"][:] = num_logits
        if logits.gathered:
            host["hidden_rows"][:num_logits] = self._tokens[:num_logits]
        self._packed.copy()
        written["cu_num_logits"][: len(batch.cu_num_logits)].copy_(batch.cu_num_logits)
        self.expanded_idx_mapping[:num_logits].copy_(batch.expanded_idx_mapping)
        self.local_pos[:num_logits].copy_(batch.expanded_local_pos)
        self.logits_indices[:num_logits].copy_(batch.logits_indices)
        if not logits.gathered:
            self.hidden_rows[:num_logits].copy_(batch.logits_indices)

    def clear(self, query_len: int) -> None:
        """Fill the buffers with padding only, `query_len` tokens per request."""
        self.write(np.empty(0, dtype=np.int64), 0, query_len)

    def stand_in(self) -> AbstractContextManager[None]:
        """Return a context in which vLLM's sampler reads the fixed parameters."""
        return stand_in(tuple(self._moving.values()), self._fixed)


@contextmanager
def stand_in(moving: Sequence[Any], fixed: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace the `gpu` of vLLM's `UvaBackedTensor`s by fixed tensors inside the context.

    After each change `gpu` is another of the tensor's host buffers, and a graph would keep reading the first.
    """
    before = [tensor.gpu for tensor in moving]
    for tensor, own in zip(moving, fixed, strict=True):
        tensor.gpu = own
    try:
        yield
    finally:
        for tensor, own in zip(moving, before, strict=True):
            tensor.gpu = own
