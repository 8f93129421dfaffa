# SPDX-License-Identifier: Apache-2.0
"""Collectives between Moore Threads GPUs, by ``torch.distributed`` over MCCL. Not run on MUSA hardware.

vLLM's communicator for CUDA is no choice here: it loads NCCL by itself and has peer-to-peer kernels of ``vllm._C``.
Expert parallelism with data parallelism needs an all-to-all manager; this communicator has none.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

# All that vLLM's communicator for any device of torch.distributed does, as a class that can stand before
# CudaCommunicator, which derives from that one.
_ByTorch: Any = type(
    "_ByTorch",
    (),
    {name: member for name, member in vars(DeviceCommunicatorBase).items() if isinstance(member, FunctionType)},
)


class MusaCommunicator(_ByTorch, CudaCommunicator):  # type: ignore[misc]  # vLLM is not there where types are checked
    """vLLM's communicator for any device of ``torch.distributed``, with an all-reduce that keeps its input, and that
    gathers, too.

    It is a ``CudaCommunicator`` only by name: around the capture of graphs ``GroupCoordinator.graph_capture`` accepts
    no other class in all versions. It is made as ``DeviceCommunicatorBase`` is, and has none of its namesake's parts.
    """

    # What CudaCommunicator.__init__ sets, in any version.
    pynccl_comm = ca_comm = qr_comm = symm_mem_comm = fi_ar_comm = fi_pcie_ipc_ar_comm = aiter_ar_comm = None
    use_custom_allreduce = use_torch_symm_mem = use_flashinfer_allreduce = use_flashinfer_pcie_ipc_allreduce = False
    use_aiter_allreduce = use_aiter_ag_rs = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group.

        vLLM calls this through an operation that is declared to change no argument, and torch.compile relies on it; the
        base class would reduce in place.
        """
        output = input_.clone()
        dist.all_reduce(output, group=self.device_group)
        return output

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate over the group, by a sum in which each member has zeros for the others.

        vllm-musa reports that MCCL's own gathering is not reliable. The sum is exact, but for the sign of a zero.

        Args:
            input_: of one shape on all members, and of a type that can be added.
            dim: the dimension to concatenate; the result has world_size times its size.
        """
        shape = list(input_.shape)
        size = shape[dim]
        shape[dim] *= self.world_size
        whole = torch.zeros(shape, dtype=input_.dtype, device=input_.device)
        whole.narrow(dim, self.rank_in_group * size, size).copy_(input_)
        dist.all_reduce(whole, group=self.device_group)
        return whole

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """As ``all_gather``, for the member of rank ``dst`` in the group; None for the others."""
        whole = self.all_gather(input_, dim)
        return whole if self.rank_in_group == dst else None
