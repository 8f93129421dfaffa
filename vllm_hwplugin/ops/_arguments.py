# SPDX-License-Identifier: Apache-2.0
"""What the references of the operations ask of their tensors, as ``csrc/common/arguments.h`` does for the kernels.

Both sides ask. Calls under vLLM's names and from compiled graphs reach a kernel past Python, and it would read or write
beyond a tensor. A reference would cast and broadcast in silence what its kernel refuses. A mistake would then show only
on a GPU.
"""

from __future__ import annotations

from typing import Final

import torch

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
HALVES: Final = (torch.float16, torch.bfloat16)

#: Types that a number with a scale may have: the largest number, and the smallest scale.
QUANTISED: Final = {torch.float8_e4m3fn: (448.0, 1 / (448.0 * 512.0)), torch.int8: (127.0, 2.0**-23)}


class Checks:
    """The checks of one call. Its other tensors have to go with one, the leading one.

    Every method raises RuntimeError where something is not as it asks.
    """

    def __init__(self, op: str, leading_name: str, leading: torch.Tensor) -> None:
        self.op = op
        self.leading_name = leading_name
        self.leading = leading

    def that(self, good: bool, text: str) -> None:
        if not good:
            raise RuntimeError(f"{self.op}: {text}")

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor | None,
        *dtypes: torch.dtype,
        shape: tuple[int, ...] | None = None,
        contiguous: bool = True,
    ) -> None:
        """On the leading one's device, of one of these types and of that shape; None has no faults."""
        if tensor is None:
            return
        device = self.leading.device
        self.that(
            tensor.device == device, f"{name} is on {tensor.device}; expected {self.leading_name}'s device, {device}"
        )
        self.that(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
        if shape is not None:
            self.that(tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        self.that(not contiguous or tensor.is_contiguous(), f"{name} is not contiguous; expected that it is")

    def bound(self, tensor: torch.Tensor | None, quantised: torch.Tensor) -> None:
        """An upper bound of scales: one number, and only for float8."""
        self.tensor("scale_ub", tensor, torch.float32)
        if tensor is not None:
            self.that(quantised.dtype != torch.int8, "scale_ub is given; expected it for float8_e4m3fn alone")
            self.that(tensor.numel() == 1, f"scale_ub has {tensor.numel()} elements; expected 1")

    def last_stride(self, name: str, tensor: torch.Tensor) -> None:
        self.that(
            tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1: call contiguous() first",
        )

    def written(self, name: str, tensor: torch.Tensor) -> None:
        """No two elements share memory by a stride of 0."""
        self.that(
            all(stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1),
            f"{name} has a stride of 0, so its elements overlap; expected a tensor that can be written",
        )


def quantise(result: torch.Tensor, quotient: torch.Tensor) -> None:
    """Round to the result's type. What is no number becomes its largest number, or 0 in int8."""
    most, _ = QUANTISED[result.dtype]
    if result.dtype == torch.int8:
        result.copy_(quotient.nan_to_num(nan=0.0).round().clamp(-128, 127))
    else:
        # A number on the tensors' device: of NaN and it fmin takes the number.
        result.copy_(torch.fmin(quotient, quotient.new_full((), most)).clamp(min=-most))
