# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.merge_attn_states``: attention over two parts of the keys, merged into attention over both.

Each part comes normalised, with its log-sum-exp (LSE). The merged output is the sum of the parts, each times ``exp(its
LSE - merged LSE)``; the merged LSE is ``log(exp(prefix LSE) + exp(suffix LSE))`` (FlashInfer, arXiv:2501.01005, section
2.2). vLLM merges like this for cascade attention, context parallelism and chunked prefill of MLA.

An infinite LSE means a part without keys: FlashAttention 2 returns +inf for it, FlashAttention 3 -inf.
"""

from __future__ import annotations

import torch

from .compile.spec import KERNELS
from .define import operation


# vLLM's declaration (csrc/torch_bindings.cpp), in 0.20.2 and in 0.32.0; only the number of tokens has no default there.
@operation(kernel=KERNELS["merge_attn_states"], writes=("output", "output_lse"))
def merge_attn_states(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Merge two attention states into ``output``, and ``output_lse`` if given.

    The output of a part with an infinite LSE is ignored. If both parts have no keys, the output is 0 and its LSE -inf,
    as on vLLM's CPU and in newer Triton kernels; vLLM's CUDA kernel writes the prefix's output there, and expects it to
    be 0.

    Args:
        output: [tokens, heads, head_size], of the parts' type, or float8_e4m3fn with an ``output_scale``. Written. It
            may be ``prefix_output`` or ``suffix_output`` itself.
        output_lse: [heads, tokens], float32, any strides. Written. It is ``prefix_lse`` or ``suffix_lse`` itself, or
            shares no memory with them.
        prefix_output, suffix_output: like ``output``; float32, float16 or bfloat16. Heads are multiples of 16 bytes and
            begin at multiples of 16 bytes, in any strides.
        prefix_lse, suffix_lse: [heads, tokens], float32, any strides.
        prefill_tokens_with_context: only the first tokens, so many, have a prefix. For the others the suffix and its
            LSE are copied, and the prefix is not read. None: all have a prefix.
        output_scale: one float32. The output is divided by it, and clamped to float8_e4m3fn's range.
    """
    tokens = output.shape[0]
    tokens_with_context = tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    part = slice(0, tokens_with_context)
    merged = suffix_output.float()
    lse = suffix_lse.clone()
    context, lse[:, part] = _merge(
        prefix_output[part].float(), prefix_lse[:, part], suffix_output[part].float(), suffix_lse[:, part]
    )
    merged = torch.cat([context, merged[tokens_with_context:]])
    if output_scale is not None:
        limit = torch.finfo(output.dtype).max
        merged = (merged * output_scale.reshape(()).reciprocal()).clamp(-limit, limit)
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(lse)


def _merge(
    prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge in the arguments' type, so that tests can use double precision."""
    outputs = torch.stack([prefix, suffix])
    lses = torch.stack([prefix_lse, suffix_lse])
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).masked_fill(empty, 0.0)
    # The output of a part without keys may be NaN, and NaN times a weight of 0 is NaN.
    outputs = outputs.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
    return (outputs * weights.transpose(1, 2).unsqueeze(-1)).sum(0), lse
