# SPDX-License-Identifier: Apache-2.0
"""An MLP whose activation is fused into the linear layer before it: `LlamaMLP` and `Qwen2MLP`, which Qwen3 has.

A module apart from :mod:`.layers`, because vLLM's linear layers import :mod:`.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

from vllm_hwplugin.linear.layers import serves


def takes(mlp: Any, x: torch.Tensor) -> bool:
    """Whether :func:`forward` computes a `LlamaMLP` or `Qwen2MLP`."""
    layer = mlp.gate_up_proj
    return (
        # No subclasses: adapters wrap a layer, and a quantized layer has another method.
        type(layer) is MergedColumnParallelLinear
        and type(layer.quant_method) is UnquantizedLinearMethod
        and type(mlp.act_fn) is SiluAndMul
        and layer.bias is None
        and not layer.gather_output
        and x.dim() == 2
        and serves(layer.weight)
    )


def forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an MLP that :func:`takes` accepts, for [tokens, hidden]."""
    out: torch.Tensor = mlp.down_proj(torch.ops.hwplugin.linear(x, mlp.gate_up_proj.weight, True))[0]
    return out
