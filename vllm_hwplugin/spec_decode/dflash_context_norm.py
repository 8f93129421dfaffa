# SPDX-License-Identifier: Apache-2.0
"""Normalise a stack of layers, each with its own weight row, on any platform.

Since 0.25.0 vLLM's DFlash drafters norm the context keys of all their layers in one call,
``ops.rms_norm(out, x[L, ...], weight[L, width], eps)``. The CUDA kernel takes the weight row by the outermost index.
Other kernels were written for one weight vector and read row 0 for every layer, without a shape check: the text stays
right, because verification catches every wrong draft, and only the acceptance falls. Which platforms do so is not a
matter of their name, and kernels get fixed, so the op itself is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import DFLASH_CONTEXT_NORM

logger = logging.getLogger("vllm.hwplugin")

_OP_IS_RIGHT = "rms_norm honours a weight row per layer; vLLM's single call is kept"

#: ``ops.rms_norm``: (out, x, weight, eps) -> None, writes ``out``.
NormOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]

# The answer may depend on the width (vectorised and plain kernels differ) and on a broadcast input, so both are part of
# the question; the number of tokens is not.
_Question = tuple[NormOp, str, torch.dtype, int, int, bool]
_answers: dict[_Question, bool] = {}


def norm_rows(op: NormOp, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
    """Write ``x``'s RMS norm into ``out``, with one weight row per layer.

    Args:
        op: the platform's ``rms_norm``, called once if it honours a weight row per layer, else once per layer.
        out: ``[L, ..., width]``, contiguous.
        x: ``[L, ..., width]``; may be broadcast over the layers (stride 0).
        weights: ``[L, width]``.
    """
    if _honours_rows(op, x, weights):
        op(out, x, weights, eps)
        return
    for layer in range(weights.shape[0]):
        op(out[layer], x[layer], weights[layer], eps)


def _honours_rows(op: NormOp, x: torch.Tensor, weights: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False  # a trace cannot run the probe; one call per layer is right everywhere
    question = (op, str(x.device), x.dtype, weights.shape[0], weights.shape[1], x.stride(0) == 0)
    if question not in _answers:
        if x.device.type in ("cuda", "musa") and torch.get_device_module(x.device).is_current_stream_capturing():
            # The probe reads its result on the host, which would break the capture. One call per layer is used until an
            # ordinary call asks; the engine's own profiling run, which comes first, is one.
            return False
        _answers[question] = _ask(op, x, weights)
        run_records.use(DFLASH_CONTEXT_NORM, not all(_answers.values()), context_norm_obstacle() or "")
    return _answers[question]


def context_norm_obstacle() -> str | None:
    """Return why vLLM's own call is used; None before any call asked."""
    return _OP_IS_RIGHT if _answers and all(_answers.values()) else None


def _ask(op: NormOp, x: torch.Tensor, weights: torch.Tensor) -> bool:
    layers, width = weights.shape
    broadcast = x.stride(0) == 0
    # The contiguous question goes first: an op that ignores the weight rows may ignore strides too, and is then never
    # given a broadcast tensor to read past.
    failure = _probe(op, layers, width, x.dtype, x.device, broadcast=False)
    if failure is None and broadcast:
        failure = _probe(op, layers, width, x.dtype, x.device, broadcast=True)
    where = f"{x.device.type} {str(x.dtype).removeprefix('torch.')} [{layers}, {width}]"
    if broadcast:
        where += " broadcast"
    decision = _OP_IS_RIGHT if failure is None else f"rms_norm {failure}; one call a layer instead"
    run_records.note(f"{DFLASH_CONTEXT_NORM} {where}", decision)
    logger.info("%s on %s: %s", DFLASH_CONTEXT_NORM, where, decision)
    return failure is None


def _probe(
    op: NormOp, layers: int, width: int, dtype: torch.dtype, device: torch.device, *, broadcast: bool
) -> str | None:
    """Return how the op differs from a plain norm, or None."""
    eps = 1e-6
    # Built without the random generator: drawing from it would change what the engine samples.
    ramp = torch.arange(layers * 2 * width, dtype=torch.float32, device=device).reshape(layers, 2, width)
    x = ramp.mul(0.37).sin().add(0.25).to(dtype)
    if broadcast:
        x = x[:1].expand(layers, -1, -1)
    weights = torch.arange(1, layers + 1, dtype=torch.float32, device=device)[:, None].expand(layers, width)
    weights = weights.contiguous().to(dtype)
    # NaN, so that rows that the op does not write cannot pass by chance.
    out = torch.full((layers, 2, width), float("nan"), dtype=dtype, device=device)
    try:
        op(out, x, weights, eps)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"rejects a weight row per layer ({type(error).__name__}: {str(error).splitlines()[0]})"
    x32 = x.float()
    wanted = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weights.float()[:, None, :]
    # Neighbouring rows differ by a factor of at least (L + 1) / L: 2 % tells them apart for up to 40 layers and is well
    # above what bfloat16 rounds.
    if torch.allclose(out.float(), wanted, rtol=0.02, atol=0.02):
        return None
    return "does not honour a weight row per layer"
