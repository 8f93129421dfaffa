# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.log_draft_rows``: what KV caches hold where draft tokens will be written (csrc/log_draft_rows).

It has no torch reference: its table holds addresses, and where the kernel cannot be loaded
:mod:`vllm_hwplugin.nwor.reference` does the same with tensors. Importing this module defines the operation and builds
nothing.
"""

from __future__ import annotations

from typing import Final

from ._define import define

_SCHEMA: Final = (
    "log_draft_rows(Tensor table, Tensor(a!) log, Tensor(b!) slots, Tensor query_start_loc, int num_reqs, int drafts, "
    "int word) -> ()"
)

define(_SCHEMA)
