# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.rms_norm_dynamic_per_token_quant``: RMS norm, quantised with one scale for each row.

As vLLM has it (csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu and layernorm_utils.cuh)::

    x = input + residual, in float32; residual becomes x rounded to its type, and what follows uses x as it is
    normal = round(x * rsqrt(sum of x**2 / hidden_size + epsilon)) * weight, both rounded to the input's type
    scale = max(min(max |normal| over the row, scale_ub) / range, smallest)
    result = normal / scale for float8, normal * (1 / scale) for int8, cut off at the range, rounded to nearest even

float8 e4m3 has the range 448 and the smallest scale 1 / (448 * 512), int8 has 127 and 2**-23. What is not a number
takes no part in a scale and becomes 448 or 0.

The kernel differs from vLLM's in the order in which squares are added, so ``normal`` can be off by one unit of its last
place where it lies between two numbers. That order does not depend on the number of rows.

The reference below serves every device, until the kernel of ``csrc/rms_norm_dynamic_per_token_quant`` is loaded and
takes over CUDA. Importing this module defines the operation and builds nothing.
"""

from __future__ import annotations

import itertools
from typing import Final

import torch

from ._define import define
from .build.jit import GPUS, ensure
from .build.spec import RMS_NORM_DYNAMIC_PER_TOKEN_QUANT

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)

# Range and smallest scale.
_QUANTISED: Final = {torch.float8_e4m3fn: (448.0, 1 / (448.0 * 512.0)), torch.int8: (127.0, 2.0**-23)}

# vLLM's (csrc/torch_bindings.cpp, since 0.24 csrc/libtorch_stable/torch_bindings.cpp); the same from 0.20.0 to 0.33.0.
_SCHEMA: Final = (
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()"
)


def rms_norm_dynamic_per_token_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Add the residual if there is one, normalise and quantise each row.

    The first call for a CUDA tensor loads the kernel, which may run a compiler: make it before graphs are captured.

    Args:
        result: input's shape, float8_e4m3fn or int8, contiguous. Written.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may lie apart, at even distances.
        weight: [hidden_size], input's type, contiguous.
        scale: as many elements as input has rows, float32, contiguous. Written.
        epsilon: added to the mean of the squares.
        scale_ub: one float32, for float8 alone: an upper bound of the row's largest value.
        residual: input's shape and type, contiguous. Becomes the sum with input.

    Raises:
        RuntimeError: a type, device, shape or stride is not as described, or hidden_size is 0.
    """
    if input.device.type in GPUS and not torch.compiler.is_compiling():
        ensure(RMS_NORM_DYNAMIC_PER_TOKEN_QUANT)
    torch.ops.hwplugin.rms_norm_dynamic_per_token_quant(result, input, weight, scale, epsilon, scale_ub, residual)


def _reference(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    _check(result, input, weight, scale, scale_ub, residual)
    if result.numel() == 0:
        return
    x = input.float()
    if residual is not None:
        x = x + residual.float()
        residual.copy_(x)
    inverse = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    normal = ((x * inverse).to(input.dtype) * weight).float()
    largest = normal.abs().masked_fill(normal.isnan(), 0.0).amax(dim=-1, keepdim=True)
    if scale_ub is not None:
        largest = torch.fmin(largest, scale_ub.reshape(()))
    # Numbers on the tensors' device: PyTorch divides a CUDA tensor by a number of Python through its reciprocal.
    limit, smallest = (normal.new_full((), number) for number in _QUANTISED[result.dtype])
    by_row = torch.fmax(largest / limit, smallest)
    scale.copy_(by_row.reshape(scale.shape))
    if result.dtype == torch.int8:
        result.copy_((normal * by_row.reciprocal()).nan_to_num(nan=0.0).round().clamp(-128, 127))
    else:
        result.copy_(torch.fmin(normal / by_row, limit).clamp(min=-_QUANTISED[result.dtype][0]))


def _check(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_ub: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """The kernel's own checks, so that a mistake shows on any device."""

    def expect(good: bool, text: str) -> None:
        if not good:
            raise RuntimeError(f"rms_norm_dynamic_per_token_quant: {text}")

    expect(
        input.dim() >= 1 and input.shape[-1] > 0,
        "input has no elements in its last dimension, so its rows have no norm",
    )
    hidden = input.shape[-1]
    rows = input.numel() // hidden
    for name, tensor in (
        ("result", result),
        ("weight", weight),
        ("scale", scale),
        ("scale_ub", scale_ub),
        ("residual", residual),
    ):
        expect(tensor is None or tensor.device == input.device, f"{name} is not on input's device, {input.device}")
    expect(result.dtype in _QUANTISED, f"result is {result.dtype}; expected float8_e4m3fn or int8")
    expect(weight.dtype == input.dtype, f"weight is {weight.dtype}; expected {input.dtype}")
    expect(scale.dtype == torch.float32, f"scale is {scale.dtype}; expected torch.float32")
    for name, tensor in (("result", result), ("residual", residual)):
        if tensor is not None:
            expect(tensor.shape == input.shape, f"{name} has another shape than input")
            expect(tensor.is_contiguous(), f"{name} is not contiguous")
    expect(
        weight.shape == (hidden,) and weight.is_contiguous(),
        f"weight has {weight.numel()} elements in {weight.dim()} dimensions; expected [{hidden}], contiguous",
    )
    expect(
        scale.numel() == rows and scale.is_contiguous(),
        f"scale has {scale.numel()} elements; expected {rows}, contiguous",
    )
    if scale_ub is not None:
        expect(scale_ub.dtype == torch.float32, f"scale_ub is {scale_ub.dtype}; expected torch.float32")
        expect(result.dtype != torch.int8, "scale_ub is given; expected it for float8_e4m3fn alone")
        expect(scale_ub.numel() == 1, f"scale_ub has {scale_ub.numel()} elements; expected 1")
    if residual is not None:
        expect(residual.dtype == input.dtype, f"residual is {residual.dtype}; expected {input.dtype}")
    expect(
        hidden == 1 or input.stride(-1) == 1,
        f"input has stride {input.stride(-1)} in its last dimension; expected 1: call contiguous() first",
    )
    apart = [(size, step) for size, step in zip(input.shape[:-1], input.stride()[:-1], strict=True) if size != 1]
    expect(
        all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(apart)),
        "input's rows do not lie at even distances: call contiguous() first",
    )
    expect(input.dtype in _DTYPES, f"input is {input.dtype}; expected float32, float16 or bfloat16")


_LIBRARY: Final = define(_SCHEMA, _reference)
