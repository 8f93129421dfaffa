# SPDX-License-Identifier: Apache-2.0
"""Body of the feature ``linear`` in models: the first half of an MLP, whose activation is part of the linear layer.

Apart from :mod:`.linear`, which vLLM's linear layers import themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

from .linear import is_served


def gate_up(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """What goes into ``down_proj`` of a `LlamaMLP` or `Qwen2MLP`."""
    layer = mlp.gate_up_proj
    if (
        # Not their relatives: adapters wrap a layer, and a quantized one has another method.
        type(layer) is MergedColumnParallelLinear
        and type(layer.quant_method) is UnquantizedLinearMethod
        and type(mlp.act_fn) is SiluAndMul
        and layer.bias is None
        and not layer.gather_output
        and x.dim() == 2
        and is_served(layer.weight)
    ):
        return torch.ops.hwplugin.skinny_linear(x, layer.weight, True)
    both, _ = layer(x)
    return mlp.act_fn(both)
