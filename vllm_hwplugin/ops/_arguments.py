# SPDX-License-Identifier: Apache-2.0
"""What the references of the operations ask of their tensors, as ``csrc/common/arguments.h`` does for the kernels.

Both sides ask. Calls under vLLM's names and from compiled graphs reach a kernel past Python, and it would read or write
beyond a tensor. A reference would cast and broadcast in silence what its kernel refuses. A mistake would then show only
on a GPU, and without one no test could compare it with what `_override_support` lets through.
"""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


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

    def device(self, name: str, tensor: torch.Tensor | None) -> None:
        expected = self.leading.device
        self.that(
            tensor is None or tensor.device == expected,
            f"{name} is on {None if tensor is None else tensor.device}; expected {self.leading_name}'s device, "
            f"{expected}",
        )

    def dtype(self, name: str, tensor: torch.Tensor, *expected: torch.dtype, words: str = "") -> None:
        """``words``: what is expected, where it is more than the types' names."""
        self.that(
            tensor.dtype in expected, f"{name} is {tensor.dtype}; expected {words or ' or '.join(map(str, expected))}"
        )

    def floats(self) -> None:
        self.dtype(self.leading_name, self.leading, *FLOATS, words="float32, float16 or bfloat16")

    def halves(self) -> None:
        self.dtype(self.leading_name, self.leading, *HALVES, words="float16 or bfloat16")

    def contiguous(self, name: str, tensor: torch.Tensor) -> None:
        self.that(tensor.is_contiguous(), f"{name} is not contiguous; expected that it is")

    def last_stride(self, name: str, tensor: torch.Tensor) -> None:
        self.that(
            tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1: call contiguous() first",
        )

    def written(self, name: str, tensor: torch.Tensor, how: str = "") -> None:
        """No two elements share memory by a stride of 0."""
        self.that(
            all(stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1),
            f"{name} has a stride of 0, so its elements overlap; expected a tensor that can be written{how}",
        )
