# SPDX-License-Identifier: Apache-2.0
"""Launch the CUDA kernel for Hopper (csrc/paged_attention), where it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

import vllm_hwplugin.ops.paged_attention  # noqa: F401  # defines the operation
from vllm_hwplugin.ops.build.jit import ensure
from vllm_hwplugin.ops.build.spec import PAGED_ATTENTION

from ._arguments import Arguments
from ._balance import balance
from ._plan import Heights, Plan

if TYPE_CHECKING:
    from ._scratch import Scratch

# The shared memory of a multiprocessor holds one program.
HEIGHTS: Final[Heights] = ((64, 1),)
_CAPABILITY: Final = (9, 0)


def load(device: torch.device) -> bool:
    """Whether the kernel serves a device. The first call may run a compiler."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY and ensure(PAGED_ATTENTION)


def launch(given: Arguments, plan: Plan, scratch: Scratch) -> None:
    num_kv_heads = given.keys.shape[2]
    shares = balance(
        plan,
        group=given.query.shape[1] // num_kv_heads,
        num_kv_heads=num_kv_heads,
        multiprocessors=scratch.multiprocessors,
    )
    operation: Any = torch.ops.hwplugin.paged_attention
    operation(
        given.query,
        given.keys,
        given.values,
        given.out,
        scratch.out,
        scratch.lse,
        given.sinks,
        given.query_start_loc,
        given.seq_lens,
        given.block_table,
        given.scale,
        given.causal,
        *given.window,
        given.softcap,
        plan.max_query_len,
        plan.blocks,
        plan.blocks_per_request,
        shares.splits,
        shares.programs,
        shares.at_once,
    )
