# SPDX-License-Identifier: Apache-2.0
"""Quantised types, and rounding to them, for the operations' torch references."""

from __future__ import annotations

from typing import Final

import torch

#: Quantised type -> largest number and smallest scale.
QUANTISED: Final = {torch.float8_e4m3fn: (448.0, 1 / (448.0 * 512.0)), torch.int8: (127.0, 2.0**-23)}


def quantise(result: torch.Tensor, quotient: torch.Tensor) -> None:
    """Round to the result's type; NaN becomes 448, or 0 in int8."""
    most, _ = QUANTISED[result.dtype]
    if result.dtype == torch.int8:
        result.copy_(quotient.nan_to_num(nan=0.0).round().clamp(-128, 127))
    else:
        # fmin(NaN, number) is the number, if both are tensors.
        result.copy_(torch.fmin(quotient, quotient.new_full((), most)).clamp(min=-most))
