# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.hwplugin.merge_attn_states``: attention over two parts of the keys, merged into attention over both.

Each part comes normalised, with its log-sum-exp (LSE). The merged output is the sum of the parts, each times
``exp(its LSE - merged LSE)``; the merged LSE is ``log(exp(prefix LSE) + exp(suffix LSE))`` (FlashInfer,
arXiv:2501.01005, section 2.2). vLLM merges so for cascade attention, context parallelism and chunked prefill of MLA.

An infinite LSE means a part without keys: FlashAttention 2 returns +inf for it, FlashAttention 3 -inf.

The reference below serves every device, until the kernel of ``csrc/merge_attn_states`` is loaded and takes over CUDA.
Importing this module defines the operation and builds nothing.
"""

from __future__ import annotations

from typing import Final

import torch

from ._define import define
from .build.jit import GPUS, ensure
from .build.spec import MERGE_ATTN_STATES

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)

# What the kernel moves at once.
_LOAD_BYTES: Final = 16

# vLLM's (csrc/torch_bindings.cpp), the same in 0.20.2 and in 0.32.0; only the number of tokens has no default there.
_SCHEMA: Final = (
    "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
    "Tensor suffix_output, Tensor suffix_lse, int? prefill_tokens_with_context=None, Tensor? output_scale=None) -> ()"
)


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
    """Merge two attention states into ``output``, and into ``output_lse`` where it is given.

    A part whose LSE is infinite had no keys; whatever its output holds is not used. Where both had none the output is 0
    and its LSE -inf, as vLLM's Triton kernel and its CPU have it in its newer releases. vLLM's CUDA kernel writes the
    prefix's output there, which it expects to be 0.

    The first call for a CUDA tensor loads the kernel, which may run a compiler: make it before graphs are captured.

    Args:
        output: [tokens, heads, head_size], of the parts' type, or float8_e4m3fn where there is an ``output_scale``.
            Written. It may be ``prefix_output`` or ``suffix_output`` itself.
        output_lse: [heads, tokens], float32, any strides. Written; it has to share no memory with the other two.
        prefix_output: like ``output``; float32, float16 or bfloat16. Heads are multiples of 16 bytes and begin at
            multiples of 16 bytes, in any strides that keep to that.
        prefix_lse: [heads, tokens], float32, any strides.
        suffix_output: like ``prefix_output``.
        suffix_lse: like ``prefix_lse``.
        prefill_tokens_with_context: only so many tokens, the first ones, have a prefix. For the others the suffix and
            its LSE are copied, and the prefix is not read. None: all have one.
        output_scale: one float32. The output is divided by it, and cut off at the largest float8_e4m3fn.

    Raises:
        RuntimeError: a type, device, shape, stride or alignment is not as described.
    """
    if output.device.type in GPUS and not torch.compiler.is_compiling():
        ensure(MERGE_ATTN_STATES)
    torch.ops.hwplugin.merge_attn_states(
        output,
        output_lse,
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        prefill_tokens_with_context,
        output_scale,
    )


def _reference(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    tokens_with_context = output.shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    _check(
        output,
        output_lse,
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        tokens_with_context,
        output_scale,
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
    """The same in the type of the arguments, so that a test can ask for double precision."""
    outputs = torch.stack([prefix, suffix])
    lses = torch.stack([prefix_lse, suffix_lse])
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).masked_fill(empty, 0.0)
    # What stands where there were no keys may be no number, which a weight of 0 would let through.
    outputs = outputs.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
    return (outputs * weights.transpose(1, 2).unsqueeze(-1)).sum(0), lse


def _check(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    tokens_with_context: int,
    output_scale: torch.Tensor | None,
) -> None:
    """The kernel's own checks, so that a mistake shows on any device."""

    def expect(good: bool, text: str) -> None:
        if not good:
            raise RuntimeError(f"merge_attn_states: {text}")

    def expect_device(name: str, tensor: torch.Tensor) -> None:
        expect(
            tensor.device == output.device, f"{name} is on {tensor.device}; expected output's device, {output.device}"
        )

    dtype = prefix_output.dtype
    expect(dtype in _DTYPES, f"prefix_output is {dtype}; expected float32, float16 or bfloat16")
    expect(
        suffix_output.dtype == dtype, f"suffix_output is {suffix_output.dtype}; expected prefix_output's type, {dtype}"
    )
    if output_scale is None:
        expect(
            output.dtype == dtype,
            f"output is {output.dtype}; expected prefix_output's type, {dtype}, where there is no output_scale",
        )
    else:
        expect(
            output.dtype == torch.float8_e4m3fn,
            f"output is {output.dtype}; expected torch.float8_e4m3fn, as there is an output_scale",
        )
        expect_device("output_scale", output_scale)
        expect(
            output_scale.dtype == torch.float32 and output_scale.numel() == 1,
            "output_scale has to be one torch.float32",
        )
    pack = _LOAD_BYTES // dtype.itemsize
    for name, tensor in (("output", output), ("prefix_output", prefix_output), ("suffix_output", suffix_output)):
        expect_device(name, tensor)
        expect(tensor.dim() == 3, f"{name} has {tensor.dim()} dimensions; expected [tokens, heads, head_size]")
        expect(tensor.shape == output.shape, f"{name} has shape {tuple(tensor.shape)}; expected {tuple(output.shape)}")
        expect(
            tensor.shape[2] % pack == 0,
            f"the heads have {tensor.shape[2]} elements; expected a multiple of {pack}, which are {_LOAD_BYTES} bytes "
            "of prefix_output",
        )
        expect(
            tensor.shape[2] <= 1 or tensor.stride(2) == 1,
            f"{name} has stride {tensor.stride(2)} in its last dimension; expected 1: call contiguous() first",
        )
        for i in (0, 1):
            expect(
                tensor.shape[i] <= 1 or tensor.shape[2] == 0 or tensor.stride(i) % pack == 0,
                f"{name}.stride({i}) is {tensor.stride(i)}; expected a multiple of {pack}: call contiguous() first",
            )
        start = pack * tensor.dtype.itemsize
        expect(
            tensor.data_ptr() % start == 0,
            f"{name} does not begin at a multiple of {start} bytes; expected that: call clone() first",
        )
    shape = (output.shape[1], output.shape[0])
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse), ("output_lse", output_lse)):
        if lse is None:
            continue
        expect_device(name, lse)
        expect(lse.dtype == torch.float32, f"{name} is {lse.dtype}; expected torch.float32")
        expect(lse.shape == shape, f"{name} has shape {tuple(lse.shape)}; expected [heads, tokens], which is {shape}")
    for name, written in (("output", output), ("output_lse", output_lse)):
        expect(
            written is None
            or all(stride > 0 for size, stride in zip(written.shape, written.stride(), strict=True) if size > 1),
            f"{name} has a stride of 0, so its elements overlap; expected a tensor that can be written",
        )
    expect(
        0 <= tokens_with_context <= output.shape[0],
        f"prefill_tokens_with_context is {tokens_with_context}; expected 0 to {output.shape[0]}",
    )


_LIBRARY: Final = define(_SCHEMA, _reference)
