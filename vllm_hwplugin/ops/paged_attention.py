# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.paged_attention``: attention with large heads, by the kernel for Hopper (csrc/paged_attention).

It has no torch reference: its arguments are those of a launch, and where the kernel cannot be loaded
:mod:`vllm_hwplugin.attention.paged` launches Triton kernels instead. Importing this module defines the operation and
builds nothing.
"""

from __future__ import annotations

from typing import Final

from ._define import define

_SCHEMA: Final = (
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor(b!) partial_out, "
    "Tensor(c!) partial_lse, Tensor? sinks, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, float scale, "
    "bool causal, int window_left, int window_right, float softcap, int max_query_len, int blocks, "
    "int blocks_per_request, int splits, int programs, int at_once) -> ()"
)

define(_SCHEMA)
