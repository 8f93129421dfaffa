# SPDX-License-Identifier: Apache-2.0
"""Agree between the ranks of an engine; imports no kernel, so obstacles can be read on any host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_dp_group, get_tp_group, model_parallel_is_initialized


def all_ranks(agreed: bool, data_parallel: bool = False) -> bool:
    """Whether all ranks of tensor parallelism agree; they wait for each other.

    With `data_parallel` also all ranks of data parallelism, which must make the same calls.
    """
    agreed = bool(over_ranks(agreed, torch.distributed.ReduceOp.MIN))
    if data_parallel and model_parallel_is_initialized():
        agreed = bool(_over(get_dp_group(), agreed, torch.distributed.ReduceOp.MIN))
    return agreed


def over_ranks(value: int, op: Any) -> int:
    """Return `op` applied to every rank's value."""
    return _over(get_tp_group(), value, op) if tensor_parallel() else value


def _over(group: Any, value: int, op: Any) -> int:
    if group.world_size == 1:
        return value
    values = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(values, op=op, group=group.cpu_group)
    return int(values.item())


def tensor_parallel() -> bool:
    """Whether this process has a tensor-parallel group of several ranks."""
    return bool(model_parallel_is_initialized() and get_tp_group().world_size > 1)
