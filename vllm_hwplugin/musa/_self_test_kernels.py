# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of the self-test: small ones, each with what MUSA's compilers are reported to get wrong."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_bits_kernel(values, count, WIDTH: tl.constexpr):
    """Sum a mask, as vLLM's kernel of top-k and top-p."""
    tl.store(count, tl.sum(tl.load(values + tl.arange(0, WIDTH)) >= 0))


@triton.jit
def count_kernel(values, count, WIDTH: tl.constexpr):
    """Sum a mask in int32, as the feature next-token-kernel."""
    tl.store(count, tl.sum((tl.load(values + tl.arange(0, WIDTH)) >= 0).to(tl.int32)))


@triton.jit
def in_place_kernel(bias, unit, values, output, WIDTH: tl.constexpr):
    """Read again what another pointer to the same memory wrote."""
    # The None and the int of 1 before the pointers are what shifts Triton 3.6's alias pairs.
    offsets = tl.arange(0, WIDTH) * unit
    tl.store(output + offsets, tl.load(values + offsets) + 1.0)
    tl.debug_barrier()
    tl.store(output + offsets, tl.load(values + offsets) * 2.0)
    if bias is not None:
        tl.store(output + offsets, tl.load(bias + offsets))


@triton.jit
def dot_kernel(left, right, output, DEPTH: tl.constexpr, SIZE: tl.constexpr):
    """Multiply two matrices in a loop that a compiler may pipeline."""
    rows, inner = tl.arange(0, SIZE), tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, DEPTH, SIZE):
        a = tl.load(left + rows[:, None] * DEPTH + start + inner[None, :])
        b = tl.load(right + (start + inner[:, None]) * SIZE + rows[None, :])
        total += tl.dot(a, b)
    tl.store(output + rows[:, None] * SIZE + rows[None, :], total)
