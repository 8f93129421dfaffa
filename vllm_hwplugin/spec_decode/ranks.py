# SPDX-License-Identifier: Apache-2.0
"""Agree between the ranks of an engine; imports no kernel, so obstacles can be read on any host."""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group, model_parallel_is_initialized


class Beyond(Flag):
    """Groups of ranks that agree in addition to a tensor-parallel group."""

    NONE = 0
    STAGES = auto()
    DATA_PARALLEL = auto()


def all_ranks(agreed: bool, beyond: Beyond = Beyond.NONE) -> bool:
    """Whether all ranks of tensor parallelism, and the groups `beyond`, agree.

    The ranks wait for each other, so all must make the same calls.
    """
    agreed = bool(over_ranks(agreed, torch.distributed.ReduceOp.MIN))
    if model_parallel_is_initialized():
        for kind, group_of in ((Beyond.STAGES, get_pp_group), (Beyond.DATA_PARALLEL, get_dp_group)):
            if kind in beyond:
                agreed = bool(_over(group_of(), agreed, torch.distributed.ReduceOp.MIN))
    return agreed


def same_on_stages(value: int) -> bool:
    """Whether all stages, which wait for each other, have this value."""
    if not model_parallel_is_initialized():
        return True
    least, most = (_over(get_pp_group(), value, getattr(torch.distributed.ReduceOp, op)) for op in ("MIN", "MAX"))
    return least == most


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
