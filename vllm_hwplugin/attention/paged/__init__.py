# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache with heads of up to 512: a CUDA kernel for Hopper, Triton kernels for other GPUs."""

from ._arguments import MAX_HEAD_SIZE, Arguments, Scratch, refuse, refuse_heads
from ._call import Kernel, kernel_for, paged_attention
from ._hopper import HopperKernel
from ._triton import TritonKernel
