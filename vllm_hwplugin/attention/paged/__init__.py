# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache with heads of up to 512: a CUDA kernel for Hopper, Triton kernels for the rest."""

from ._arguments import MAX_HEAD_SIZE, refuse, refuse_heads
from ._call import paged_attention
from ._scratch import Scratch

__all__ = ["MAX_HEAD_SIZE", "Scratch", "paged_attention", "refuse", "refuse_heads"]
