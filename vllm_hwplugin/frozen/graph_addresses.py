# SPDX-License-Identifier: Apache-2.0
"""Keep the layout tensors of block tables at addresses that CUDA graphs may read.

vLLM's `BlockTables` keeps addresses, strides and block sizes in small tensors, and up to 0.28 allocates them again when
the KV cache wakes up: sleeping discards their contents with the cache's. The memory itself comes back at its old
address. An eager launch of `compute_slot_mappings` gets the new tensors. In a graph it reads the old ones, whose
contents are gone, and the draft's keys go wherever they point to.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_addresses(block_tables: Any) -> None:
    """Copy layout tensors, just made, into the tensors that CUDA graphs read.

    Raises:
        RuntimeError: a tensor's shape or dtype has changed, which no wake-up does.
    """
    made = {name: value for name, value in vars(block_tables).items() if isinstance(value, torch.Tensor)}
    first: dict[str, torch.Tensor] = vars(block_tables).setdefault("kept_tensors", made)
    for name, tensor in first.items():
        new = made[name]
        if new is tensor:
            continue
        if (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"BlockTables.{name} has become {new.dtype} {tuple(new.shape)}, expected {tensor.dtype} "
                f"{tuple(tensor.shape)} as before, which CUDA graphs read; start without sleep mode"
            )
        tensor.copy_(new)
        setattr(block_tables, name, tensor)
