# SPDX-License-Identifier: Apache-2.0
"""Choice of vLLM's layers that :mod:`.operations` computes.

torch.compile traces these functions, so they only ask for types and sizes of weights, never for the number of tokens.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm import envs
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from vllm.platforms import current_platform

from vllm_hwplugin.linear.operations import norm_fits, tile_for

_CAPABILITY: Final = (9, 0)

# Smaller norms belong to heads, and Inductor fuses them with their neighbours.
_SMALLEST_NORM: Final = 512


def _on_hopper() -> bool:
    # cuBLAS computes larger batches, so a token's result would depend on the size of the batch.
    if not current_platform.is_cuda() or envs.VLLM_BATCH_INVARIANT:
        return False
    capability = current_platform.get_device_capability()
    return capability is not None and (capability.major, capability.minor) == _CAPABILITY


#: Whether the kernels are for this process's GPU. A constant, because torch.compile cannot trace the query.
ON_HOPPER: Final = _on_hopper()


def gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, like vLLM's `default_unquantized_gemm`.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs].
    """
    if bias is None and x.dim() == 2 and serves(weight):
        return torch.ops.hwplugin.linear(x, weight)
    return torch.nn.functional.linear(x, weight, bias)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _on_one_gpu() -> bool:
    # With tensor parallelism vLLM may fuse a norm with the all-reduce before it.
    return not model_parallel_is_initialized() or get_tp_group().world_size == 1


def takes_norm(layer: Any, x: torch.Tensor) -> bool:
    """Whether the kernel computes this `RMSNorm` of hidden states."""
    return (
        ON_HOPPER
        and _on_one_gpu()
        and x.dim() == 2
        and x.dtype is torch.bfloat16
        and layer.has_weight
        and layer.variance_size_override is None
        and layer.weight.dtype is torch.bfloat16
        and x.shape[-1] >= _SMALLEST_NORM
        and norm_fits(x.shape[-1])
    )


def norm(
    layer: Any, x: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `RMSNorm.forward_native` by the plugin's operations."""
    weight = layer.weight.data
    if residual is None:
        return torch.ops.hwplugin.rms_norm(x, weight, layer.variance_epsilon)
    return torch.ops.hwplugin.add_rms_norm(x, residual, weight, layer.variance_epsilon)


def serves(weight: torch.Tensor) -> bool:
    """Whether the plugin's operation is for a layer with these weights."""
    return (
        ON_HOPPER
        and weight.dim() == 2
        and weight.dtype is torch.bfloat16
        and tile_for(weight.shape[0], weight.shape[1]) is not None
    )
