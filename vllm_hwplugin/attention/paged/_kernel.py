# SPDX-License-Identifier: Apache-2.0
"""What a kernel of paged attention is, whichever language it is written in."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import torch

from ._arguments import MAX_HEAD_SIZE, Arguments
from ._plan import SCRATCH_ROWS, Heights, LaunchPlan


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory of fixed size, so that memory profiling sees all of it and captured graphs keep its address.

    One serves all layers whose kernels run one after the other on a stream.

    Args:
        out: [rows * head size], float32.
        lse: [rows], float32; log-sum-exp in units of log2(e).
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> Scratch:
        """Take 64 MiB of a device's memory."""
        return cls(
            torch.empty(SCRATCH_ROWS * MAX_HEAD_SIZE, dtype=torch.float32, device=device),
            torch.empty(SCRATCH_ROWS, dtype=torch.float32, device=device),
        )


class Kernel(Protocol):
    """One for a device. It has no memory and no state.

    Attributes:
        name: for logs and tests.
        heights: rows of each tile that it has, and how many programs with it share a multiprocessor.
        multiprocessors: of the device.
    """

    name: ClassVar[str]
    heights: ClassVar[Heights]

    @property
    def multiprocessors(self) -> int: ...

    def check(self, given: Arguments) -> None:
        """Refuse what a plan or a launch would take wrongly, except what the launch itself refuses.

        Raises:
            ValueError: what, found, expected.
        """

    def launch(self, given: Arguments, plan: LaunchPlan, scratch: Scratch) -> None:
        """Run one batch.

        Raises:
            RuntimeError: the CUDA operation has refused an argument.
        """
