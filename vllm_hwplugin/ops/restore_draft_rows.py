# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.restore_draft_rows``: rejected draft tokens out of KV caches (csrc/restore_draft_rows).

It has no torch reference: its table holds addresses, and where the kernel cannot be loaded
:mod:`vllm_hwplugin.nwor.reference` does the same with tensors. Importing this module defines the operation and builds
nothing.
"""

from __future__ import annotations

from typing import Final

from ._define import define

# What is written is in no argument but by its address in the table, so the table stands for it: a compiler drops calls
# that write nothing.
_SCHEMA: Final = (
    "restore_draft_rows(Tensor(a!) table, Tensor? log, Tensor(b!)? slots, Tensor query_start_loc, "
    "Tensor? num_rejected, Tensor? sampled_token_ids, Tensor? cu_num_draft_tokens, int num_reqs, int drafts, "
    "int word) -> ()"
)

define(_SCHEMA)
