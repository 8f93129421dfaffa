# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.rms_norm_dynamic_per_token_quant``: RMS norm, quantised with one scale for each row.

The formulas are vLLM's (csrc/quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu and
layernorm_utils.cuh)::

    x = input + residual, in float32; residual becomes x rounded to its type, the rest uses the unrounded x
    normal = round(x * rsqrt(sum of x**2 / hidden_size + epsilon)) * weight, both rounded to the input's type
    scale = max(min(max |normal| over the row, scale_ub) / range, smallest)
    result = normal / scale for float8, normal * (1 / scale) for int8, clamped to the range, rounded to nearest even

float8 e4m3 has the range 448 and the smallest scale 1 / (448 * 512), int8 has 127 and 2**-23. NaN does not affect a
scale and becomes 448 or 0.

The kernel adds squares in another order than vLLM's, so ``normal`` can be off by one unit in its last place. The order
does not depend on the number of rows.
"""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation
from .quantise import QUANTISED, quantise


# vLLM's declaration (csrc/torch_bindings.cpp, since 0.24 csrc/libtorch_stable/torch_bindings.cpp), 0.20.0 to 0.33.0.
@operation(kernel=KERNELS["rms_norm_dynamic_per_token_quant"], writes=("result", "scale", "residual"))
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

    Args:
        result: like input, float8_e4m3fn or int8, contiguous. Written.
        input: [..., hidden_size], float32, float16 or bfloat16; hidden_size is not 0. Rows may lie apart, at even
            distances.
        weight: [hidden_size], input's type, contiguous.
        scale: as many elements as input has rows, float32, contiguous. Written.
        epsilon: added to the mean of the squares.
        scale_ub: one float32, only for float8: upper bound of the row's largest value.
        residual: input's shape and type, contiguous. Becomes the sum with input.
    """
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
    # As tensors, because PyTorch divides a CUDA tensor by a Python number through its reciprocal.
    limit, smallest = (normal.new_full((), number) for number in QUANTISED[result.dtype])
    by_row = torch.fmax(largest / limit, smallest)
    scale.copy_(by_row.reshape(scale.shape))
    quantise(result, normal * by_row.reciprocal() if result.dtype == torch.int8 else normal / by_row)
