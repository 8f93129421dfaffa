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

from ._arguments import Checks
from ._define import operation
from .compile.spec import RMS_NORM_DYNAMIC_PER_TOKEN_QUANT

# Range and smallest scale.
_QUANTISED: Final = {torch.float8_e4m3fn: (448.0, 1 / (448.0 * 512.0)), torch.int8: (127.0, 2.0**-23)}


# As vLLM has it (csrc/torch_bindings.cpp, since 0.24 csrc/libtorch_stable/torch_bindings.cpp), from 0.20.0 to 0.33.0.
@operation(kernel=RMS_NORM_DYNAMIC_PER_TOKEN_QUANT, writes=("result", "scale", "residual"))
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
    checks = Checks("rms_norm_dynamic_per_token_quant", "input", input)
    checks.that(
        input.dim() >= 1 and input.shape[-1] > 0,
        "input has no elements in its last dimension, so its rows have no norm",
    )
    hidden = input.shape[-1]
    rows = input.numel() // hidden
    for name, tensor in (("result", result), ("weight", weight), ("scale", scale)):
        checks.device(name, tensor)
    checks.dtype("result", result, *_QUANTISED, words="float8_e4m3fn or int8")
    checks.dtype("weight", weight, input.dtype)
    checks.dtype("scale", scale, torch.float32)
    _check_like_input(checks, "result", result)
    checks.that(
        weight.shape == (hidden,) and weight.is_contiguous(),
        f"weight has {weight.numel()} elements in {weight.dim()} dimensions; expected [{hidden}], contiguous",
    )
    checks.that(
        scale.numel() == rows and scale.is_contiguous(),
        f"scale has {scale.numel()} elements; expected {rows}, contiguous",
    )
    if scale_ub is not None:
        checks.device("scale_ub", scale_ub)
        checks.dtype("scale_ub", scale_ub, torch.float32)
        checks.that(result.dtype != torch.int8, "scale_ub is given; expected it for float8_e4m3fn alone")
        checks.that(scale_ub.numel() == 1, f"scale_ub has {scale_ub.numel()} elements; expected 1")
    if residual is not None:
        checks.device("residual", residual)
        checks.dtype("residual", residual, input.dtype)
        _check_like_input(checks, "residual", residual)
    checks.last_stride("input", input)
    apart = [(size, step) for size, step in zip(input.shape[:-1], input.stride()[:-1], strict=True) if size != 1]
    checks.that(
        all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(apart)),
        "input's rows do not lie at even distances: call contiguous() first",
    )
    checks.floats()
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


def _check_like_input(checks: Checks, name: str, tensor: torch.Tensor) -> None:
    checks.that(tensor.shape == checks.leading.shape, f"{name} has another shape than input")
    checks.contiguous(name, tensor)
