# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.silu_and_mul_per_block_quant``: silu of a row's first half times the second, quantised by group.

The formulas are vLLM's (csrc/quantization/fused_kernels/fused_silu_mul_block_quant.cu), in float32 from load to store::

    value = gate * (1 / (1 + exp(-gate))) * up
    scale = max(min(max |value| over the group / range, scale_ub), smallest)
    out = value / scale, clamped to the range and rounded to nearest even

float8 e4m3 has the range 448 and the smallest scale 1 / (448 * 512), int8 has 127 and 2**-23. ``value`` is not rounded
to the input's type; vLLM's separate operations round it. Unlike in ``rms_norm_dynamic_per_token_quant``, ``scale_ub``
bounds the scale and not the largest value. NaN does not affect a scale and becomes 448 or 0. The scale of a group of
NaN is ``scale_ub`` or the smallest.
"""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation
from .quantise import QUANTISED, quantise


# vLLM's declaration (csrc/torch_bindings.cpp, since 0.24 csrc/libtorch_stable/torch_bindings.cpp), 0.20.0 to 0.33.0.
@operation(kernel=KERNELS["silu_and_mul_per_block_quant"], writes=("out", "scales"))
def silu_and_mul_per_block_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """Activate, multiply and quantise each row.

    Args:
        out: [tokens, hidden_size], float8_e4m3fn or int8, contiguous. Written.
        input: [tokens, 2 * hidden_size], float16 or bfloat16, `gate` and then `up`. Rows may lie apart.
        scales: [tokens, hidden_size / group_size], float32. Written. Rows may lie apart; transposed, columns may, as in
            ``torch.empty(groups, tokens).t()``, also with padding for TMA. Transposed, also [groups, tokens].

        group_size: 64 or 128; hidden_size is a multiple of it.
        scale_ub: one float32, only for float8: upper bound of the scales.
        is_scale_transposed: tokens are contiguous in ``scales``, not groups.
    """
    tokens, groups = out.shape[0], out.shape[1] // group_size
    turned = scales.shape != (tokens, groups) or (tokens == groups > 1 and scales.stride(1) == 1)
    by_token = scales.t() if is_scale_transposed and turned else scales
    if out.numel() == 0:
        return
    gate, up = input.float().chunk(2, dim=-1)
    value = (gate * (1 / (1 + torch.exp(-gate))) * up).unflatten(-1, (-1, group_size))
    largest = value.abs().masked_fill(value.isnan(), -torch.inf).amax(dim=-1)
    largest = largest.masked_fill(largest < 0, torch.nan)
    # As tensors, because PyTorch divides a CUDA tensor by a Python number through its reciprocal.
    limit, smallest = (value.new_full((), number) for number in QUANTISED[out.dtype])
    scale = largest / limit
    if scale_ub is not None:
        scale = torch.fmin(scale, scale_ub.reshape(()))
    scale = torch.fmax(scale, smallest)
    by_token.copy_(scale)
    quantise(out, (value / scale.unsqueeze(-1)).flatten(-2))
