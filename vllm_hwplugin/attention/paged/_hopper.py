# SPDX-License-Identifier: Apache-2.0
"""Launch the CUDA kernel for Hopper (csrc/paged_attention), if it is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import torch

from vllm_hwplugin.ops.compile.jit import ensure
from vllm_hwplugin.ops.compile.spec import KERNELS
from vllm_hwplugin.ops.define import define

from ._arguments import Arguments, Scratch, check_heads
from ._plan import Heights, LaunchPlan, balance

_CAPABILITY: Final = (9, 0)

# Without a torch reference: its arguments describe a launch, and Triton kernels run instead.
define(
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor(b!) partial_out, "
    "Tensor(c!) partial_lse, Tensor? sinks, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, float scale, "
    "bool causal, int window_left, int window_right, float softcap, int max_query_len, int blocks, "
    "int blocks_per_request, int splits, int programs, int at_once) -> ()"
)


@dataclasses.dataclass(frozen=True)
class HopperKernel:
    """See :data:`~._call.Kernel`."""

    name: ClassVar[str] = "hopper"
    # The shared memory of a multiprocessor holds one program.
    heights: ClassVar[Heights] = ((64, 1),)

    multiprocessors: int

    @classmethod
    def load(cls, device: torch.device) -> HopperKernel | None:
        """Return the device's kernel or None; the first call may compile it."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
            return None
        if not ensure(KERNELS["paged_attention"]):
            return None
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def check(self, given: Arguments) -> None:
        # The operation checks the rest in C++, which takes less of the host's time.
        check_heads(given.query, given.keys)

    def launch(self, given: Arguments, plan: LaunchPlan, scratch: Scratch) -> None:
        num_kv_heads = given.keys.shape[2]
        shares = balance(
            plan,
            group=given.query.shape[1] // num_kv_heads,
            num_kv_heads=num_kv_heads,
            multiprocessors=self.multiprocessors,
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
