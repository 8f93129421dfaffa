# SPDX-License-Identifier: Apache-2.0
"""Collectives between Moore Threads GPUs, by ``torch.distributed`` over MCCL. Not run on MUSA hardware.

vLLM's communicator for CUDA loads NCCL and uses kernels of ``vllm._C``. Expert parallelism with data parallelism is not
supported: it needs an all-to-all manager.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

# The functions of vLLM's DeviceCommunicatorBase, as a class that can precede its subclass CudaCommunicator.
_ByTorch: Any = type(
    "_ByTorch",
    (),
    {name: member for name, member in vars(DeviceCommunicatorBase).items() if isinstance(member, FunctionType)},
)


class MusaCommunicator(_ByTorch, CudaCommunicator):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's ``DeviceCommunicatorBase`` with an out-of-place all-reduce, which also gathers."""

    # `CudaCommunicator` only by type: some versions of `GroupCoordinator.graph_capture` accept no other.

    # The attributes that CudaCommunicator.__init__ sets, in any version.
    pynccl_comm = ca_comm = qr_comm = symm_mem_comm = fi_ar_comm = fi_pcie_ipc_ar_comm = aiter_ar_comm = None
    use_custom_allreduce = use_torch_symm_mem = use_flashinfer_allreduce = use_flashinfer_pcie_ipc_allreduce = False
    use_aiter_allreduce = use_aiter_ag_rs = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group, out of place.

        vLLM's operation around this is declared to mutate no argument, and torch.compile relies on that.
        """
        output = input_.clone()
        dist.all_reduce(output, group=self.device_group)
        return output

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate over the group along `dim`, by a sum of zero-padded inputs.

        vllm-musa reports that MCCL's all-gather is not reliable. The sum is exact except for the sign of a zero.
        """
        shape = list(input_.shape)
        size = shape[dim]
        shape[dim] *= self.world_size
        whole = torch.zeros(shape, dtype=input_.dtype, device=input_.device)
        whole.narrow(dim, self.rank_in_group * size, size).copy_(input_)
        dist.all_reduce(whole, group=self.device_group)
        return whole

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Gather to rank ``dst`` of the group; return None on other ranks."""
        whole = self.all_gather(input_, dim)
        return whole if self.rank_in_group == dst else None
