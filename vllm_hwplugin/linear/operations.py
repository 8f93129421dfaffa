# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.linear``, ``rms_norm`` and ``add_rms_norm``: layers of few tokens that overlap, on Hopper.

A step of a few tokens takes the time of reading the weights, and memory idles between two linear layers: a kernel ends,
the next one starts, and only then loads its weights. These kernels load them while the kernel before them ends
(csrc/skinny_linear), for up to 32 tokens. Graphs that vLLM compiles for more tokens do not use the operations
(:mod:`.restore_pass`); without compilation, or without a separate range, larger calls run cuBLAS inside the operation.

Sums are in float32 and in a fixed order: the same operands give the same bits, with overlap and without.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from vllm_hwplugin.base import features, run_records
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.ops.compile.jit import GPUS, ensure
from vllm_hwplugin.ops.compile.spec import KERNELS
from vllm_hwplugin.ops.define import define

_KERNEL: Final = KERNELS["skinny_linear"]

#: cuBLAS computes more tokens.
MOST_TOKENS: Final = 32

#: Rows and columns of weights in a block's tile, as in ``csrc/skinny_linear``.
TILES: Final = ((16, 512), (32, 256), (32, 512), (48, 256), (64, 256))

# With fewer outputs too few blocks would read weights.
_FEWEST_OUTPUTS: Final = 1024

define("skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, bool gated, int rows, int depth, bool overlap) -> ()")
define(
    "skinny_norm(Tensor(a!) out, Tensor(b!)? sum, Tensor x, Tensor? residual, Tensor weight, float epsilon, "
    "bool overlap) -> ()"
)


def tile_for(outputs: int, inputs: int) -> tuple[int, int] | None:
    """Return the tile for weights [outputs, inputs], or None."""
    if outputs < _FEWEST_OUTPUTS:
        return None
    order: tuple[tuple[int, int], ...]
    # Large tiles read x less often; small tiles make enough blocks for all multiprocessors.
    if outputs >= 64 * 132:
        order = ((64, 256), (48, 256), (32, 256))
    elif outputs >= 48 * 64:
        order = ((48, 256), (32, 512), (32, 256), (16, 512))
    elif outputs >= 32 * 64:
        order = ((32, 512), (32, 256), (16, 512))
    else:
        order = ((16, 512), (32, 256))
    return next((tile for tile in order if outputs % tile[0] == 0 and inputs % tile[1] == 0), None)


def linear(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """Return ``x @ weight.T``; if gated, ``silu(first half) * second half``.

    Args:
        x: [tokens, inputs], bfloat16 for the kernel.
        weight: [outputs, inputs], contiguous for the kernel. No kernel just before this call may write to it.

    Returns:
        [tokens, outputs], or [tokens, outputs / 2]; contiguous.
    """
    # First, even if the kernel does not compute this call: the kernel must be loaded before any graph is captured.
    if _is_loaded(x) and (tile := _tile_of(x, weight)) is not None:
        out = x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
        torch.ops.hwplugin.skinny_linear(out, x, weight, gated, *tile, True)
        return out
    product = F.linear(x, weight)
    return _gate(product) if gated else product


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMS norm of each row of x, computed in float32."""
    if _is_loaded(x) and _norm_serves(x, weight):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.ops.hwplugin.skinny_norm(out, None, x, None, weight, epsilon, True)
        return out
    return _norm(x.float(), weight, epsilon).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of ``x + residual``, and that sum."""
    if _is_loaded(x) and _norm_serves(x, weight, residual):
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        torch.ops.hwplugin.skinny_norm(out, total, x, residual, weight, epsilon, True)
        return out, total
    added = x.float() + residual.float()
    return _norm(added, weight, epsilon).to(x.dtype), added.to(x.dtype)


def _is_loaded(x: torch.Tensor) -> bool:
    """Whether the kernel is for this device; loads it outside captures."""
    global _loaded
    if _loaded is None and x.device.type in GPUS and not torch.cuda.is_current_stream_capturing():
        _loaded = _KERNEL.is_for(torch.cuda.get_device_capability(x.device)) and ensure(_KERNEL)
        if _loaded:
            run_records.note(features.LINEAR, f"linear layers of up to {MOST_TOKENS} tokens are the plugin's kernels")
        else:
            # torch.compile has not fused the norms with their neighbours then.
            report_unused(
                features.LINEAR, "linear layers are cuBLAS's", "the kernel cannot be loaded, the log says why"
            )
    return bool(_loaded) and x.device.type in GPUS


_loaded: bool | None = None


def _rows_serve(rows: torch.Tensor) -> bool:
    # The copy engine and loads of 16 bytes need these strides and addresses.
    return (
        rows.dim() == 2
        and rows.dtype is torch.bfloat16
        and rows.stride(1) == 1
        and (rows.shape[0] <= 1 or (rows.stride(0) >= rows.shape[1] and rows.stride(0) % 8 == 0))
        and rows.data_ptr() % 16 == 0
    )


def _tile_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int] | None:
    serves = x.dim() == 2 and 0 < x.shape[0] <= MOST_TOKENS and _rows_serve(x) and _rows_serve(weight)
    # Offloaded weights are on another device.
    if not serves or weight.device != x.device or not weight.is_contiguous():
        return None
    return tile_for(weight.shape[0], weight.shape[1])


def _norm_serves(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    return (
        len(x) > 0
        and _rows_serve(x)
        and (residual is None or _rows_serve(residual))
        and norm_fits(x.shape[1])
        and weight.device == x.device
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def norm_fits(hidden: int) -> bool:
    """Whether the kernel is for rows of that many elements."""
    return hidden % 256 == 0 and hidden <= 8192


def _norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def _gate(product: torch.Tensor) -> torch.Tensor:
    half = product.shape[-1] // 2
    if product.is_cuda and hasattr(torch.ops._C, "silu_and_mul"):
        out = product.new_empty(*product.shape[:-1], half)
        torch.ops._C.silu_and_mul(out, product)
        return out
    return F.silu(product[..., :half]) * product[..., half:]


def _shape_of_linear(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0])


define("linear(Tensor x, Tensor weight, bool gated=False) -> Tensor", linear, _shape_of_linear)
define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", rms_norm, lambda x, *_: x.new_empty(x.shape))
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    add_rms_norm,
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
