# SPDX-License-Identifier: Apache-2.0
"""What the graphs of a step's tail read and write, at addresses that never change.

Model Runner V2 makes most of a batch's small tensors anew in each step, and its sampling parameters move between two
host buffers. A decode batch of requests with equally many tokens needs none of that: all but the requests' rows in the
runner's state follow from their number. So the rows are kept here, and written when other requests are decoded than in
the step before. For any other batch where its logits are is written, too, in each step.

A batch may have fewer requests than the graph. The surplus requests, *padding*, take a row that no request has: their
results go where nobody reads. `Padding` says what keeps them out of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        block_start_loc: [num_reqs + 1], int32: of the target's query tokens, as many for each request.
        dead_tokens: [num_reqs * the target's query tokens of a request], bool: those of padding.
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


@dataclass(frozen=True)
class LogitsRows:
    """Where the requests of a batch have the rows of which logits are made.

    Attributes:
        num_logits: [number of requests]: how many rows each has, which are its last tokens in the batch.
        query_ends: [number of requests]: where its tokens end.
        gathered: whether the hidden states that a graph reads are these rows, and not those of all tokens.
    """

    num_logits: np.ndarray
    query_ends: np.ndarray
    gathered: bool


class _Packed:
    """Tensors of several types in one piece of memory, which one copy fills from the host.

    Args:
        parts: name -> shape and type.
        device: of the tensors.

    Attributes:
        host: name -> what the next copy takes, as an array.
        device: name -> the tensor.
    """

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        places, size = {}, 0
        for name, (shape, dtype) in parts.items():
            places[name] = size, size + math.prod(shape) * dtype.itemsize
            # Triton makes kernels for addresses that are multiples of 16.
            size = -(-places[name][1] // 16) * 16
        self._host = torch.zeros(size, dtype=torch.uint8)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        on_host, self.device = (
            {name: whole[slice(*places[name])].view(dtype).view(shape) for name, (shape, dtype) in parts.items()}
            for whole in (self._host, self._device)
        )
        self.host = {name: tensor.numpy() for name, tensor in on_host.items()}

    def copy(self) -> None:
        # A copy that does not wait needs pinned memory, which torch keeps until the copy is done.
        self._device.copy_(self._host.pin_memory(), non_blocking=True)


class TailBuffers:
    """The buffers of one runner's tail graphs.

    Args:
        runner: a `GPUModelRunner` of Model Runner V2 that has its KV cache.
        max_num_reqs: of the largest graph.
        query_len: tokens of a request in a decode batch, 1 + num_speculative_tokens: with a schedule, at most.
        idx_dtype: what the runner's `idx_mapping` is made of.
        chunk_rows: rows of logits that are sampled at a time, a power of two. A chunk holds whole requests, and each
            request has room for `query_len` rows in it.

    Attributes:
        cu_num_logits: [max_num_reqs + 1], int32: rows of logits that the requests before each have.
        expanded_idx_mapping, local_pos, logits_indices: [max_num_reqs * query_len]: of each row of logits its request's
            row in the runner's state, which of the request's it is, and its token in the batch. Within a chunk the
            rows of its requests follow each other; what is left of its room belongs to no request.
        hidden_rows: [max_num_reqs * query_len], int64: its token in the hidden states that a graph reads.
        temperature, seeds: [max_num_reqs of the runner].
        outputs: see `Outputs`.
    """

    def __init__(self, runner: Any, max_num_reqs: int, query_len: int, idx_dtype: torch.dtype, chunk_rows: int):
        self._chunk_rows = chunk_rows
        device, num_tokens = runner.device, max_num_reqs * query_len
        states = runner.sampler.sampling_states
        # As they are named here.
        self._moving = {
            "temperature": states.temperature,
            "top_k": states.top_k,
            "top_p": states.top_p,
            "seeds": states.seeds,
            "prefill_len": runner.req_states.prefill_len,
        }
        self._packed = _Packed(
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
                **{name: (one.np.shape, one.gpu.dtype) for name, one in self._moving.items()},
            },
            device,
        )
        written = self._packed.device
        self._fixed = tuple(written[name] for name in self._moving)
        self._tokens = np.arange(num_tokens)
        self.temperature, self.seeds = written["temperature"], written["seeds"]
        self.cu_num_logits, self.expanded_idx_mapping = written["cu_num_logits"], written["expanded_rows"]
        self.local_pos, self.logits_indices = written["local_pos"], written["logits_indices"]
        self.hidden_rows = written["hidden_rows"]
        self.outputs = Outputs(
            torch.zeros(max_num_reqs, query_len, dtype=torch.int64, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        )

    def chunk_reqs(self, query_len: int) -> int:
        """Return how many requests of `query_len` tokens are sampled at a time.

        A multiple of 16 where that many fit: Triton makes other kernels for addresses that 16 does not divide.
        """
        most = max(1, self._chunk_rows // query_len)
        return most // 16 * 16 or most

    def idx_mapping(self, num_reqs: int) -> torch.Tensor:
        """[num_reqs]: each request's row in the runner's state; padding has one that no request has."""
        return self._packed.device["rows"][:num_reqs]

    def idx_mapping_alive(self, num_reqs: int) -> torch.Tensor:
        """[num_reqs]: the same with -1 for padding, which `post_update` passes over."""
        return self._packed.device["rows_alive"][:num_reqs]

    def padding(self, num_reqs: int, query_len: int) -> Padding:
        """Of a graph of `num_reqs` requests with `query_len` tokens each."""
        written = self._packed.device
        return Padding(
            written["alive"][:num_reqs],
            written["query_start_loc"][: num_reqs + 1],
            written["block_start_loc"][: num_reqs + 1],
            written["dead_tokens"][: num_reqs * query_len],
        )

    def write(self, rows: np.ndarray, free_row: int, query_len: int, logits: LogitsRows | None = None) -> None:
        """Have these requests in the graphs, each at the row given, with its parameters and its prompt's length.

        Args:
            rows: [number of requests], integers.
            free_row: of padding.
            query_len: tokens of a request in the graphs.
            logits: where the requests have theirs, at most `query_len` rows each. By default as many as it has tokens.
        """
        host, count = self._packed.host, len(rows)
        most, tokens = len(host["rows"]), self._tokens
        host["rows"][:count], host["rows"][count:] = rows, free_row
        host["rows_alive"][:count], host["rows_alive"][count:] = rows, -1
        host["alive"][:count], host["alive"][count:] = 1, 0
        np.minimum(np.arange(most + 1), count, out=host["query_start_loc"])
        np.multiply(host["query_start_loc"], query_len, out=host["block_start_loc"])
        host["dead_tokens"][:] = tokens >= count * query_len

        num_logits: Any = np.full(most, query_len if logits is None else 1)
        if logits is not None:
            num_logits[:count] = logits.num_logits
        ends = host["cu_num_logits"][1:]
        np.cumsum(num_logits, out=ends)
        # Of each row of logits: its request, and its place. Places between are nobody's.
        request: Any = np.repeat(np.arange(most), num_logits)
        row, starts = tokens[: len(request)], host["cu_num_logits"]
        chunk_reqs = self.chunk_reqs(query_len)
        first: Any = request // chunk_reqs * chunk_reqs
        place = first * query_len + row - starts[first]
        for name, rest in (("expanded_rows", free_row), ("local_pos", 0), ("logits_indices", 0), ("hidden_rows", 0)):
            host[name][:] = rest
        host["expanded_rows"][place] = host["rows"][request]
        host["local_pos"][place] = row - starts[request]
        last: Any = ends
        if logits is not None:
            last = np.ones(most, dtype=np.int64)
            last[:count] = logits.query_ends
        host["logits_indices"][place] = row + (last - ends)[request]
        host["hidden_rows"][place] = row if logits is None or logits.gathered else host["logits_indices"][place]

        for name, moving in self._moving.items():
            host[name][:] = moving.np
        self._packed.copy()

    def clear(self, query_len: int) -> None:
        """Have padding alone in the graphs, of which each request has `query_len` tokens."""
        self.write(np.empty(0, dtype=np.int64), 0, query_len)

    def stand_in(self) -> StandIn:
        """A context in which vLLM's sampler reads the fixed parameters."""
        return StandIn(tuple(self._moving.values()), self._fixed)


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
