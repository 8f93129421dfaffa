# SPDX-License-Identifier: Apache-2.0
"""Agree between the ranks of tensor parallelism; imports no kernel, so obstacles can be read on any host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized


def all_ranks(agreed: bool) -> bool:
    """Whether all ranks of tensor parallelism agree; they wait for each other."""
    return bool(over_ranks(agreed, torch.distributed.ReduceOp.MIN))


def over_ranks(value: int, op: Any) -> int:
    """Return `op` applied to every rank's value."""
    if not tensor_parallel():
        return value
    values = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(values, op=op, group=get_tp_group().cpu_group)
    return int(values.item())


def tensor_parallel() -> bool:
    """Whether this process has a tensor-parallel group of several ranks."""
    return bool(model_parallel_is_initialized() and get_tp_group().world_size > 1)
