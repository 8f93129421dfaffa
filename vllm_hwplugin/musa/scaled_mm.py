# SPDX-License-Identifier: Apache-2.0
"""``torch._scaled_mm`` of FP8 on a Moore Threads GPU: whether it is right, and its replacement. Not run on hardware.

The source of torch_musa 2.7.1 (``Matmul.cpp``) states that the first operand must be row-major, the second
column-major, and the sizes divisible by 32, and checks none of it. A product of 1 or 17 rows, as vLLM makes, is not.
"""

from __future__ import annotations

import functools

import torch

# Rows: a decode, vLLM's padding in eager mode, and more than a block.
_ROWS = (1, 17, 33)
# Widths of operands and result: divisible by 32, and not.
_WIDTHS = {True: (64, 96), False: (48, 40)}
_TOLERANCE = 0.01


def product_error(device: str | torch.device, rows: int, inner: int, outputs: int, out_dtype: torch.dtype) -> float:
    """Return the relative error of one ``torch._scaled_mm``.

    It is the largest error against float32 on the CPU, divided by the largest expected number.

    Args:
        device: The device to try; it must not be capturing a graph.
        rows, inner, outputs: Sizes: (rows, inner) by (inner, outputs).
        out_dtype: Type of the result.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    scale = torch.full((1,), 0.5, dtype=torch.float32, device=device)
    a, b = (
        torch.randn(size, inner, generator=generator, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
        for size in (rows, outputs)
    )
    expected = a.float() @ b.float().t() / 4
    result = torch._scaled_mm(a.to(device), b.to(device).t(), scale_a=scale, scale_b=scale, out_dtype=out_dtype)
    return float((result.cpu().float() - expected).abs().max() / expected.abs().max())


def wrong_by(error: float) -> str:
    """Describe an error above the tolerance (or NaN), or return ""."""
    return "" if error <= _TOLERANCE else f"wrong by {error:.0%} of its largest number"


@functools.cache
def scaled_mm_trouble(device: str, out_dtype: torch.dtype, divisible: bool) -> str:
    """Return what is wrong with ``torch._scaled_mm``, or "".

    Args:
        device: The device to try; it must not be capturing a graph.
        out_dtype: Type of the result.
        divisible: Whether the operands' widths are divisible by 32.
    """
    inner, outputs = _WIDTHS[divisible]
    for rows in _ROWS:
        shape = f"torch._scaled_mm of ({rows}, {inner}) and ({inner}, {outputs}) to {out_dtype}"
        try:
            wrong = wrong_by(product_error(device, rows, inner, outputs, out_dtype))
        except (RuntimeError, ValueError) as refusal:
            return f"{shape} fails: {refusal}"
        if wrong:
            return f"{shape} is {wrong}"
    return ""


def dequantized_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply FP8 matrices as numbers of the result's type.

    Args:
        a: (rows, inner), FP8.
        b: (inner, outputs), FP8.
        scale_a: float32, one, or one per row.
        scale_b: float32, one, or one per output.
        bias: (outputs,), or None.
        out_dtype: The result's type, of 16 bits. The operands are scaled before, because float16 holds no product of
            unscaled ones.
    """
    left = (a.float() * scale_a.reshape(-1, 1)).to(out_dtype)
    right = (b.float() * scale_b.reshape(1, -1)).to(out_dtype)
    product = left @ right
    return product if bias is None else product + bias
