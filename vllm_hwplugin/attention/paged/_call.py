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
    given: Arguments, *, max_query_len: int, kernel: Kernel, scratch: Scratch, batch_invariant: bool = False
) -> None:
    """Write the attention of new tokens over keys in a paged cache.

    The queries of a request are its last tokens, whose keys are in the cache. A launch reads tensors and bounds, never
    a tensor's value: a CUDA graph can capture it, and its replay computes any batch within the bounds. Rows of ``out``
    behind the last request are not written. A row that sees no key is zero.

    Args:
        max_query_len: an upper bound of a request's new tokens.
        kernel: of query's device, from :func:`kernel_for`.
        scratch: of query's device.
        batch_invariant: a row's result is bit-identical in every batch, and slower in small batches.

    Raises:
        ValueError: a shape, type, stride or device is not as described.
        RuntimeError: the same, from the CUDA kernel's operation.
    """
    query = given.query
    kernel.check(given)
    if scratch.out.device != query.device:
        raise ValueError(
            f"paged_attention: the scratch is on {scratch.out.device}, query on {query.device}; expected one of "
            "Scratch.allocate(query.device)"
        )
    plan = plan_launch(
        kernel.heights,
        num_requests=given.seq_lens.shape[0],
        num_tokens=query.shape[0],
        max_query_len=max_query_len,
        num_heads=query.shape[1],
        num_kv_heads=given.keys.shape[2],
        multiprocessors=kernel.multiprocessors,
        batch_invariant=batch_invariant,
    )
    if plan.blocks > 0:
        kernel.launch(given, plan, scratch)
