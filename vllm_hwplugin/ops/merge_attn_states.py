# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.merge_attn_states``: attention over two parts of the keys, merged into attention over both.

Each part comes normalised, with its log-sum-exp (LSE). The merged output is the sum of the parts, each times ``exp(its
LSE - merged LSE)``; the merged LSE is ``log(exp(prefix LSE) + exp(suffix LSE))`` (FlashInfer, arXiv:2501.01005, section
2.2). vLLM merges like this for cascade attention, context parallelism and chunked prefill of MLA.

An infinite LSE means a part without keys: FlashAttention 2 returns +inf for it, FlashAttention 3 -inf.
"""

from __future__ import annotations

from typing import Final

import torch

from .arguments import FLOATS, Checks
from .compile.spec import KERNELS
from .define import operation

# Bytes of one load.
_LOAD_BYTES: Final = 16


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
    checks = Checks("merge_attn_states", "output", output)
    dtype = prefix_output.dtype
    checks.tensor("prefix_output", prefix_output, *FLOATS, contiguous=False)
    checks.tensor("suffix_output", suffix_output, dtype, contiguous=False)
    checks.tensor("output", output, dtype if output_scale is None else torch.float8_e4m3fn, contiguous=False)
    checks.tensor("output_scale", output_scale, torch.float32)
    checks.that(output_scale is None or output_scale.numel() == 1, "output_scale has several elements; expected one")
    for name, heads in (("output", output), ("prefix_output", prefix_output), ("suffix_output", suffix_output)):
        _check_heads(checks, name, heads, _LOAD_BYTES // dtype.itemsize)
    checks.written("output", output)
    tokens, n_heads, _ = output.shape
    for name, lses in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse), ("output_lse", output_lse)):
        checks.tensor(name, lses, torch.float32, shape=(n_heads, tokens), contiguous=False)
    if output_lse is not None:
        checks.written("output_lse", output_lse)
    tokens_with_context = tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    checks.that(
        0 <= tokens_with_context <= tokens,
        f"prefill_tokens_with_context is {tokens_with_context}; expected 0 to {tokens}",
    )
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


def _check_heads(checks: Checks, name: str, tensor: torch.Tensor, pack: int) -> None:
    """Check shape, strides and alignment for loads of `pack` elements."""
    expected = checks.leading.shape
    checks.that(tensor.dim() == 3, f"{name} has {tensor.dim()} dimensions; expected [tokens, heads, head_size]")
    checks.that(tensor.shape == expected, f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected)}")
    checks.that(
        tensor.shape[2] % pack == 0,
        f"the heads have {tensor.shape[2]} elements; expected a multiple of {pack}, which are {_LOAD_BYTES} bytes "
        "of prefix_output",
    )
    checks.last_stride(name, tensor)
    for i in (0, 1):
        checks.that(
            tensor.shape[i] <= 1 or tensor.shape[2] == 0 or tensor.stride(i) % pack == 0,
            f"{name}.stride({i}) is {tensor.stride(i)}; expected a multiple of {pack}: call contiguous() first",
        )
    start = pack * tensor.dtype.itemsize
    checks.that(
        tensor.data_ptr() % start == 0,
        f"{name} does not begin at a multiple of {start} bytes: call clone() first",
    )
