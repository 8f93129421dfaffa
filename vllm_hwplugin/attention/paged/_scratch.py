# SPDX-License-Identifier: Apache-2.0
"""Where splits leave their results until they are merged."""

from __future__ import annotations

import dataclasses

import torch

from ._arguments import MAX_HEAD_SIZE
from ._plan import SCRATCH_ROWS


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
