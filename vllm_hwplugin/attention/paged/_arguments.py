# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call, its scratch memory, and checks."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from ..backends import CUDA, LARGEST_GROUP
from ._plan import SCRATCH_ROWS

MAX_HEAD_SIZE: Final = CUDA.largest_head
_ALIGNMENT: Final = CUDA.head_multiple
_DTYPES: Final = tuple(getattr(torch, name) for name in CUDA.dtypes)
_ACCESS: Final = 16  # bytes


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The tensors of a call, and its mask.

    Args:
        query: [tokens, heads, head size], float16 or bfloat16; the last stride 1, the others multiples of 8.
        keys: [blocks, block size, KV heads, head size], query's type, any strides like query's.
        values: like keys.
        out: like query.
        query_start_loc: [requests + 1], int32: start of each request's tokens, and the last one's end.
        seq_lens: [requests], int32: keys of each.
        block_table: [requests, blocks], int32.
        scale: of the logits.
        causal: a token sees keys up to its own.
        window: tokens seen before and after a token's own; -1 for no end.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        sinks: [heads], float32: the logit of a key without a value.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scale: float
    causal: bool
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory of fixed size, so that memory profiling sees all of it and captured graphs keep its address.

    All layers whose kernels run one after another on a stream share it.

    Args:
        out: [rows * head size], float32.
        lse: [rows], float32; log-sum-exp in units of log2(e).
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> Scratch:
        """Allocate 64 MiB on a device."""
        return cls(
            torch.empty(SCRATCH_ROWS * MAX_HEAD_SIZE, dtype=torch.float32, device=device),
            torch.empty(SCRATCH_ROWS, dtype=torch.float32, device=device),
        )


def refuse(head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int) -> str | None:
    """Return why a layer cannot run, or None."""
    if head_size <= 0 or head_size > MAX_HEAD_SIZE or head_size % _ALIGNMENT:
        return f"head size is {head_size}, expected a multiple of {_ALIGNMENT} up to {MAX_HEAD_SIZE}"
    if dtype not in _DTYPES:
        return f"queries are {dtype}, expected {' or '.join(map(str, _DTYPES))}"
    if kv_dtype != dtype:
        return f"the KV cache is {kv_dtype}, expected the queries' type, {dtype}"
    if block_size <= 0 or block_size % CUDA.page_multiple:
        return f"a page has {block_size} tokens, expected a multiple of {CUDA.page_multiple}"
    return None


def refuse_heads(num_heads: int, num_kv_heads: int) -> str | None:
    """Return why query heads cannot share KV heads, or None."""
    # vLLM's selector does not know these numbers.
    most = LARGEST_GROUP
    if num_heads <= 0 or num_kv_heads <= 0 or num_heads % num_kv_heads or num_heads // num_kv_heads > most:
        return f"{num_heads} query heads and {num_kv_heads} KV heads, expected a multiple, and at most {most} times"
    return None


def check_heads(query: torch.Tensor, keys: torch.Tensor) -> None:
    """Check the shapes that a plan divides, or raise ValueError."""
    _expect(query.dim() == 3, f"query has shape {tuple(query.shape)}, expected [tokens, heads, head size]")
    _expect(keys.dim() == 4, f"keys have shape {tuple(keys.shape)}, expected [blocks, block size, KV heads, head size]")
    reason = refuse_heads(query.shape[1], keys.shape[2])
    _expect(reason is None, str(reason))


def check(given: Arguments) -> None:
    """Check shapes, strides and devices, never values.

    Raises:
        ValueError: a kernel would read or write wrongly.
    """
    query, keys, values, out = given.query, given.keys, given.values, given.out
    check_heads(query, keys)
    num_heads, head_size = query.shape[1:]
    _expect(keys.shape[3] == head_size, f"keys have head size {keys.shape[3]}, query has {head_size}")
    reason = refuse(head_size, query.dtype, keys.dtype, keys.shape[1])
    _expect(reason is None, str(reason))
    tensors = (("query", query, query), ("keys", keys, keys), ("values", values, keys), ("out", out, query))
    for name, tensor, like in tensors:
        _check_tensor(name, tensor, query, query.dtype, tuple(like.shape))
        _expect(
            tensor.stride(-1) == 1
            and all(
                size == 1 or (stride > 0 and stride % _ALIGNMENT == 0)
                for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
            ),
            f"{name} has strides {tensor.stride()}, expected 1 in the last dimension and multiples of {_ALIGNMENT} "
            "before it",
        )
        _expect(tensor.data_ptr() % _ACCESS == 0, f"{name} does not start at a multiple of {_ACCESS} bytes")
    requests, sinks = given.seq_lens.shape[0], given.sinks
    blocks = given.block_table[:requests]
    for name, tensor, shape in (
        ("query_start_loc", given.query_start_loc, (requests + 1,)),
        ("seq_lens", given.seq_lens, (requests,)),
        ("block_table", blocks, (requests, *blocks.shape[1:2])),
    ):
        _check_tensor(name, tensor, query, torch.int32, shape)
        _expect(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name} is not contiguous in its last dimension")
    if sinks is not None:
        _check_tensor("sinks", sinks, query, torch.float32, (num_heads,))
        _expect(sinks.is_contiguous(), "sinks is not contiguous")


def _check_tensor(
    name: str, tensor: torch.Tensor, query: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    _expect(tensor.device == query.device, f"{name} is on {tensor.device}; expected query's device, {query.device}")
    _expect(tensor.dtype == dtype, f"{name} is {tensor.dtype}; expected {dtype}")
    _expect(tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


def _expect(good: bool, text: str) -> None:
    if not good:
        raise ValueError(f"paged_attention: {text}")
