# SPDX-License-Identifier: Apache-2.0
"""Attention of the plugin, of PyTorch and of vLLM's backends, called as the backends call it.

Each function is a `Prepare`. It raises `Missing` or `Refused` if it has no call for the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from vllm_hwplugin.attention import paged

from . import _attention_cases as names
from ._attention_bench import DTYPE, Batch, Prepare
from ._supervise import Missing, Refused, needed
from ._timer import Call


def ours(batch: Batch, *, triton: bool = False) -> Call:
    """Prepare ``vllm_hwplugin.attention.paged`` with this device's kernel, or with its Triton kernels."""
    case = batch.case
    if reason := paged.refuse(case.head_size, DTYPE, DTYPE, case.page):
        raise Refused(reason)
    kernel, scratch = _loaded(batch.query.device, triton)

    def call() -> Any:
        given = paged.Arguments(
            batch.query,
            batch.keys,
            batch.values,
            batch.output,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            scale=batch.scale,
            causal=True,
        )
        paged.paged_attention(given, max_query_len=case.query, kernel=kernel, scratch=scratch)
        return batch.output

    return call


@cache
def _loaded(device: Any, triton: bool) -> tuple[Any, Any]:
    return (paged.TritonKernel.load if triton else paged.kernel_for)(device), paged.Scratch.allocate(device)


def sdpa(batch: Batch, *, repeated: bool) -> Call:
    """Prepare ``scaled_dot_product_attention``, for which PyTorch chooses the kernel.

    With ``repeated`` the heads of keys and values are repeated before the clock starts, for kernels without grouped
    queries.
    """
    case = batch.case
    if set(case.lengths) != {case.query}:
        # Its causal mask begins at the first key.
        raise Refused("its causal flag is for queries as long as the keys")
    pair = batch.contiguous()
    if repeated:
        pair = tuple(tensor.repeat_interleave(case.heads // case.kv_heads, dim=1) for tensor in pair)
    query, key, value = (
        tensor.unflatten(0, (case.batch, -1)).transpose(1, 2).contiguous() for tensor in (batch.query, *pair)
    )

    def call() -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=batch.scale, enable_gqa=not repeated
        )
        return output.transpose(1, 2).flatten(0, 1)

    return call


def flex(batch: Batch) -> Call:
    """Prepare FlexAttention, compiled as in vLLM's FLEX_ATTENTION backend.

    It has the backend's block sizes and kernel options. The backend masks the whole paged cache; here the tokens are
    contiguous, so the kernel needs no block table. The backend also copies the result into the layer's output, which is
    not measured.
    """
    case = batch.case
    if set(case.lengths) != {case.query}:
        raise Refused("measured for prefill only")
    backend = needed("vllm.v1.attention.backends.flex_attention")
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (batch.query, *batch.contiguous()))
    block = (int(backend.FlexAttentionMetadata.q_block_size), case.page)
    mask = _mask(case.batch, case.query, block, str(query.device))
    options = backend.get_kernel_options(query, *block, True)
    more = {"enable_gqa": case.kv_heads != case.heads, "kernel_options": options}
    attend = partial(backend.flex_attention_compiled, query, key, value, None, mask, batch.scale, **more)
    return lambda: attend()[0].transpose(0, 1)


@cache
def _mask(requests: int, length: int, block: tuple[int, int], device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal_in_its_request(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query // length == key // length) & (query >= key)

    tokens = requests * length
    return create_block_mask(causal_in_its_request, None, None, tokens, tokens, device=device, BLOCK_SIZE=block)


def unified(batch: Batch) -> Call:
    """Prepare vLLM's unified attention, with the TRITON_ATTN backend's split of the context.

    In an engine the backend rounds its threshold to a capture size; here it is unrounded.
    """
    backend = needed("vllm.v1.attention.backends.triton_attn")
    function: Callable[..., Any] = needed("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    case = batch.case
    # The backend's constants: with fewer requests than the threshold, the context is split into segments.
    threshold, segments = backend.MIN_LAUNCH_GRID_SIZE_2D // case.kv_heads, backend.NUM_PAR_SOFTMAX_SEGMENTS
    rows = (threshold, case.heads, segments)
    empty = partial(torch.empty, dtype=torch.float32, device=batch.query.device)
    ones = torch.ones(1, dtype=torch.float32, device=batch.query.device).expand(case.batch, case.kv_heads)
    arguments = {
        "q": batch.query,
        "k": batch.keys,
        "v": batch.values,
        "out": batch.output,
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": case.query,
        "seqused_k": batch.seq_lens,
        "max_seqlen_k": max(case.lengths),
        "softmax_scale": batch.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.block_table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": ones,
        "v_descale": ones,
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": empty(*rows, 1 << (case.head_size - 1).bit_length()),
        "softmax_segm_max": empty(rows),
        "softmax_segm_expsum": empty(rows),
    }
    # Versions without the split lack the last five arguments; arguments of later versions have defaults.
    known = inspect.signature(function).parameters
    chosen = {name: value for name, value in arguments.items() if name in known}

    def call() -> Any:
        function(**chosen)
        return batch.output

    return call


def flash_attention(batch: Batch, *, version: int, largest: int) -> Call:
    """Prepare a version of vLLM's FlashAttention."""
    case = batch.case
    interface = needed("vllm.vllm_flash_attn.flash_attn_interface")
    if version == 4:
        # `is_fa_version_supported` only checks that its file exists.
        needed("vllm.vllm_flash_attn.cute.interface")
    if not interface.is_fa_version_supported(version):
        raise Missing(str(interface.fa_version_unsupported_reason(version)))
    if case.head_size > largest:
        raise Refused(f"FlashAttention {version} has head sizes up to {largest}")
    longest = max(case.lengths)

    def call() -> Any:
        interface.flash_attn_varlen_func(
            q=batch.query,
            k=batch.keys,
            v=batch.values,
            out=batch.output,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=case.query,
            max_seqlen_k=longest,
            softmax_scale=batch.scale,
            causal=True,
            fa_version=version,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
        )
        return batch.output

    return call


KERNELS: dict[str, Prepare] = {
    names.OURS: ours,
    names.OURS_TRITON: partial(ours, triton=True),
    names.SDPA: partial(sdpa, repeated=False),
    names.SDPA_REPEATED: partial(sdpa, repeated=True),
    names.TRITON: unified,
    names.FA3: partial(flash_attention, version=3, largest=256),
    names.FA4: partial(flash_attention, version=4, largest=512),
    names.FLEX: flex,
}
