# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.topk_softmax``: softmax over the experts of each token, and the ``topk`` largest of them.

What vLLM routes mixtures of experts with, and its rules (vLLM csrc/moe/topk_softmax_kernels.cu): of equal experts the
lower one comes first. A row whose softmax is no number, as padding can leave it, counts as all 0 and so gets the first
experts, each once, with weights of 0.

In one thing it differs. Without a bias, logits of 16 bits are compared themselves, vLLM compares their probabilities in
float32. Those of two unequal logits may round to the same number, most of all to 0: vLLM then takes the lower expert,
and this the one of the larger logit. Their weights are the same.

The reference below serves every device, until the kernel of ``csrc/topk_softmax`` is loaded and takes over CUDA.
Importing this module defines the operation and builds nothing.
"""

from __future__ import annotations

from typing import Final

import torch

from ._define import define
from .build.jit import GPUS, ensure
from .build.spec import TOPK_SOFTMAX

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_INDEX_DTYPES: Final = (torch.int32, torch.int64, torch.uint32)

# vLLM's (csrc/moe/torch_bindings.cpp). It ends with bias in 0.20.2 to 0.26.0, and has is_padding from 0.27.0 on.
_SCHEMA: Final = (
    "topk_softmax(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor(c!) token_expert_indices, "
    "Tensor gating_output, bool renormalize, Tensor? bias=None, Tensor? is_padding=None) -> ()"
)


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Choose ``topk`` experts for each token.

    The first call for a CUDA tensor loads the kernel, which may run a compiler: make it before graphs are captured.

    Args:
        topk_weights: [tokens, topk], float32, contiguous. Written: the probabilities, largest first.
        topk_indices: [tokens, topk], int32, int64 or uint32, contiguous. Written: the experts.
        token_expert_indices: [tokens, topk], int32, contiguous. Written: ``slot * tokens + token``.
        gating_output: [tokens, experts], float32, float16 or bfloat16, logits. Rows may lie apart.
        renormalize: divide the weights of a token by their sum, where that is not 0.
        bias: [experts], float32, contiguous. Experts are chosen by probability + bias; the weights are without it.
        is_padding: [tokens], bool, contiguous. The indices of these tokens become -1.

    Raises:
        RuntimeError: a type, device, shape or stride is not as described, or topk is larger than the number of experts.
    """
    if gating_output.device.type in GPUS and not torch.compiler.is_compiling():
        ensure(TOPK_SOFTMAX)
    torch.ops.hwplugin.topk_softmax(
        topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias, is_padding
    )


def _reference(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    _check(topk_weights, topk_indices, token_expert_indices, gating_output, bias, is_padding)
    tokens, topk = topk_weights.shape
    softmax = torch.softmax(gating_output, dim=-1, dtype=torch.float32)
    broken = softmax.isnan().any(dim=-1, keepdim=True)
    probabilities = softmax.masked_fill(broken, 0.0)
    if bias is not None:
        choice = probabilities + bias
        # Torch has what is no number first.
        choice = choice.masked_fill(choice.isnan(), -torch.inf)
    elif gating_output.dtype.itemsize == 2:
        choice = gating_output.masked_fill(broken, 0.0)
    else:
        choice = probabilities
    # torch.topk promises nothing about ties; a stable sort keeps the lower expert first.
    chosen = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = probabilities.gather(1, chosen)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    if is_padding is not None:
        chosen = chosen.masked_fill(is_padding.unsqueeze(1), -1)
    topk_weights.copy_(weights)
    # PyTorch fills uint32 from int64 on few devices; the bits of int32 are the same.
    indices = topk_indices.view(torch.int32) if topk_indices.dtype == torch.uint32 else topk_indices
    indices.copy_(chosen)
    places = torch.arange(topk * tokens, dtype=torch.int32, device=gating_output.device)
    token_expert_indices.copy_(places.view(topk, tokens).t())


def _check(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """The kernel's own checks, so that a mistake shows on any device."""

    def expect(good: bool, text: str) -> None:
        if not good:
            raise RuntimeError(f"topk_softmax: {text}")

    def expect_device(name: str, tensor: torch.Tensor) -> None:
        expect(
            tensor.device == gating_output.device,
            f"{name} is on {tensor.device}; expected gating_output's device, {gating_output.device}",
        )

    expect(gating_output.dim() == 2, f"gating_output has {gating_output.dim()} dimensions; expected [tokens, experts]")
    expect(
        gating_output.dtype in _DTYPES, f"gating_output is {gating_output.dtype}; expected float32, float16 or bfloat16"
    )
    tokens, experts = gating_output.shape
    expect(
        experts <= 1 or gating_output.stride(1) == 1,
        f"gating_output has stride {gating_output.stride(1)} in its last dimension; expected 1: call contiguous()",
    )
    expect(topk_weights.dim() == 2, f"topk_weights has {topk_weights.dim()} dimensions; expected [tokens, topk]")
    topk = topk_weights.shape[1]
    expect(topk <= experts, f"topk is {topk}; expected at most the number of experts, {experts}")
    limit = torch.iinfo(torch.int32).max
    expect(
        experts <= limit and tokens * topk <= limit,
        f"{tokens} tokens, {experts} experts and topk={topk}; expected numbers of 32 bits for experts and for "
        "tokens * topk",
    )
    for name, tensor, dtypes in (
        ("topk_weights", topk_weights, (torch.float32,)),
        ("topk_indices", topk_indices, _INDEX_DTYPES),
        ("token_expert_indices", token_expert_indices, (torch.int32,)),
    ):
        expect_device(name, tensor)
        expect(
            tensor.shape == (tokens, topk),
            f"{name} has shape {tuple(tensor.shape)}; expected [tokens, topk], which is {(tokens, topk)}",
        )
        expect(tensor.is_contiguous(), f"{name} is not contiguous; expected that it is")
        expect(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    for name, vector, length, dtype in (
        ("bias", bias, experts, torch.float32),
        ("is_padding", is_padding, tokens, torch.bool),
    ):
        if vector is None:
            continue
        expect_device(name, vector)
        expect(vector.dtype == dtype, f"{name} is {vector.dtype}; expected {dtype}")
        expect(
            vector.shape == (length,) and vector.is_contiguous(),
            f"{name} has shape {tuple(vector.shape)}; expected {(length,)}, contiguous",
        )


_LIBRARY: Final = define(_SCHEMA, _reference)
