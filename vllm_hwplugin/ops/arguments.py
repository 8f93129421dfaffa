# SPDX-License-Identifier: Apache-2.0
"""Checks of the operations' tensors in Python, as in ``csrc/common/arguments.h`` for the kernels.

Both sides check. Calls under vLLM's names and from compiled graphs reach a kernel without Python, and a bad tensor
would make it read or write out of bounds. A reference would cast and broadcast silently what its kernel refuses, and a
mistake would show only on a GPU.
"""

from __future__ import annotations

from typing import Final

import torch

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
HALVES: Final = (torch.float16, torch.bfloat16)

#: Quantised type -> largest number and smallest scale.
QUANTISED: Final = {torch.float8_e4m3fn: (448.0, 1 / (448.0 * 512.0)), torch.int8: (127.0, 2.0**-23)}


class Checks:
    """The checks of one call, which raise `error`. All tensors are compared with the leading tensor."""

    def __init__(
        self, op: str, leading_name: str, leading: torch.Tensor, error: type[Exception] = RuntimeError
    ) -> None:
        self.op = op
        self.error = error
        self.leading_name = leading_name
        self.leading = leading

    def that(self, good: bool, text: str) -> None:
        if not good:
            raise self.error(f"{self.op}: {text}")

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor | None,
        *dtypes: torch.dtype,
        shape: tuple[int, ...] | None = None,
        contiguous: bool = True,
    ) -> None:
        """Check device, type, shape and contiguity; None passes."""
        if tensor is None:
            return
        device = self.leading.device
        self.that(
            tensor.device == device, f"{name} is on {tensor.device}; expected {self.leading_name}'s device, {device}"
        )
        self.that(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
        if shape is not None:
            self.that(tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        self.that(not contiguous or tensor.is_contiguous(), f"{name} is not contiguous; expected a contiguous tensor")

    def bound(self, tensor: torch.Tensor | None, quantised: torch.Tensor) -> None:
        """Check an upper bound of scales: one number, only for float8."""
        self.tensor("scale_ub", tensor, torch.float32)
        if tensor is not None:
            self.that(quantised.dtype != torch.int8, "scale_ub is given; expected only for float8_e4m3fn")
            self.that(tensor.numel() == 1, f"scale_ub has {tensor.numel()} elements; expected 1")

    def last_stride(self, name: str, tensor: torch.Tensor) -> None:
        self.that(
            tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1: call contiguous() first",
        )

    def written(self, name: str, tensor: torch.Tensor) -> None:
        """Check that no elements share memory by a stride of 0."""
        self.that(
            all(stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1),
            f"{name} has a stride of 0, so its elements overlap; expected a tensor that can be written",
        )


def quantise(result: torch.Tensor, quotient: torch.Tensor) -> None:
    """Round to the result's type; NaN becomes 448, or 0 in int8."""
    most, _ = QUANTISED[result.dtype]
    if result.dtype == torch.int8:
        result.copy_(quotient.nan_to_num(nan=0.0).round().clamp(-128, 127))
    else:
        # fmin(NaN, number) is the number, if both are tensors.
        result.copy_(torch.fmin(quotient, quotient.new_full((), most)).clamp(min=-most))
