# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.topk_softmax``: softmax over the experts of each token, and the ``topk`` largest of them.

vLLM routes mixtures of experts with it, by these rules (vLLM csrc/moe/topk_softmax_kernels.cu): of equal experts the
lower one comes first. A row whose softmax is NaN, as in padding, counts as all 0 and so gets the first experts, each
once, with weights of 0.

There is one difference. Without a bias, this compares 16-bit logits themselves, and vLLM their probabilities in
float32. Two unequal logits may have equal probabilities after rounding, most of all 0. Then vLLM takes the lower
expert, and this operation the expert with the larger logit. The weights are the same.
"""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation


# vLLM's declaration (csrc/moe/torch_bindings.cpp). It ends with bias in 0.20.2 to 0.26.0, and with is_padding from
# 0.27.0.
@operation(kernel=KERNELS["topk_softmax"], writes=("topk_weights", "topk_indices", "token_expert_indices"))
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

    Args:
        topk_weights: [tokens, topk], float32, contiguous. Written: the probabilities, largest first.
        topk_indices: [tokens, topk], int32, int64 or uint32, contiguous. Written: the experts.
        token_expert_indices: [tokens, topk], int32, contiguous. Written: ``slot * tokens + token``.
        gating_output: [tokens, experts], float32, float16 or bfloat16, logits. Rows may lie apart. At least topk
            experts.
        renormalize: divide a token's weights by their sum, unless it is 0.
        bias: [experts], float32, contiguous. Experts are chosen by probability + bias; the weights are without bias.
        is_padding: [tokens], bool, contiguous. The indices of padding become -1.

    """
    tokens, topk = topk_weights.shape
    softmax = torch.softmax(gating_output, dim=-1, dtype=torch.float32)
    broken = softmax.isnan().any(dim=-1, keepdim=True)
    probabilities = softmax.masked_fill(broken, 0.0)
    if bias is not None:
        choice = probabilities + bias
        # torch.sort puts NaN first.

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
