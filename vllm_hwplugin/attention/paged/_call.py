# SPDX-License-Identifier: Apache-2.0
"""Check a call, plan the launch, launch."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ._arguments import Arguments, Scratch
from ._hopper import HopperKernel
from ._plan import plan_launch
from ._triton import TritonKernel

Kernel: TypeAlias = HopperKernel | TritonKernel
"""A device's kernel, without memory and state.

``heights`` are its tiles, ``check`` refuses arguments that a plan or launch would misread, ``launch`` runs a batch.
"""


def kernel_for(device: torch.device) -> Kernel:
    """Return the device's fastest kernel; the first call may compile it."""
    return HopperKernel.load(device) or TritonKernel.load(device)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    scale: float,
    causal: bool,
    kernel: Kernel,
    scratch: Scratch,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write the attention of new tokens over keys in a paged cache.

    The queries of a request are its last tokens, whose keys are in the cache. A launch reads tensors and bounds, never
    a tensor's value: a CUDA graph can capture it, and its replay computes any batch within the bounds. Rows of ``out``
    behind the last request are not written. A row that sees no key is zero.

    Args:
        query: [tokens, heads, head size], float16 or bfloat16; the last stride 1, the others multiples of 8.
        keys: [blocks, block size, KV heads, head size], query's type, any strides like query's.
        values: like keys.
        out: like query.
        query_start_loc: [requests + 1], int32: start of each request's tokens, and the last one's end.
        seq_lens: [requests], int32: keys of each.
        block_table: [requests, blocks], int32.
        max_query_len: an upper bound of a request's new tokens.
        scale: of the logits.
        causal: a token sees keys up to its own.
        kernel: of query's device, from :func:`kernel_for`.
        scratch: of query's device.
        window: tokens seen before and after a token's own; -1 for no end.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        sinks: [heads], float32: the logit of a key without a value.
        batch_invariant: a row's result is bit-identical in every batch, and slower in small batches.

    Raises:
        ValueError: a shape, type, stride or device is not as described.
        RuntimeError: the same, from the CUDA kernel's operation.
    """
    given = Arguments(
        query,
        keys,
        values,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        causal,
        window,
        softcap,
        sinks,
    )
    kernel.check(given)
    if scratch.out.device != query.device:
        raise ValueError(
            f"paged_attention: the scratch is on {scratch.out.device}, query on {query.device}; expected one of "
            "Scratch.allocate(query.device)"
        )
    plan = plan_launch(
        kernel.heights,
        num_requests=seq_lens.shape[0],
        num_tokens=query.shape[0],
        max_query_len=max_query_len,
        num_heads=query.shape[1],
        num_kv_heads=keys.shape[2],
        multiprocessors=kernel.multiprocessors,
        batch_invariant=batch_invariant,
    )
    if plan.blocks > 0:
        kernel.launch(given, plan, scratch)
