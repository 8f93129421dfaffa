# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernel and those of vLLM's backends, called as the backends call them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from . import _attention_cases as names
from ._attention_cases import AttentionCase
from ._attention_inputs import DTYPE, Batch
from ._timer import Call


def unimportable(*modules: str) -> str | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # an extension that does not fit raises all kinds of errors
            return f"{module} is not importable: {type(error).__name__}: {error}".splitlines()[0]
    return None


class AttentionKernel:
    """One column of the table.

    Attributes:
        modules: what has to be importable.
    """

    name: str
    modules: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Why it cannot be used on this host, or None."""
        return unimportable(*self.modules)

    def refuses(self, case: AttentionCase) -> str | None:
        """Why it does not claim to run ``case``, or None."""
        return None

    def prepare(self, batch: Batch) -> Call:
        """Do what a step does once for all layers; the call launches, and returns ``[tokens, heads, head_size]``."""
        raise NotImplementedError


class Ours(AttentionKernel):
    """``vllm_hwplugin.attention.paged``, by the kernel that it takes on this device, or by its Triton kernels."""

    modules = ("vllm_hwplugin.attention.paged",)

    def __init__(self, *, triton: bool = False) -> None:
        self.name = names.OURS_TRITON if triton else names.OURS
        self._triton = triton
        self._on: tuple[Any, Any] | None = None

    def refuses(self, case: AttentionCase) -> str | None:
        from vllm_hwplugin.attention import paged

        return paged.refuse(case.head_size, DTYPE, DTYPE, case.page)

    def prepare(self, batch: Batch) -> Call:
        from vllm_hwplugin.attention import paged

        if self._on is None:
            device = batch.query.device
            load = paged.TritonKernel.load if self._triton else paged.kernel_for
            self._on = load(device), paged.Scratch.allocate(device)
        case, (kernel, scratch) = batch.case, self._on

        def call() -> Any:
            paged.paged_attention(
                batch.query,
                batch.keys,
                batch.values,
                batch.output,
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                block_table=batch.block_table,
                max_query_len=case.query,
                scale=batch.scale,
                causal=True,
                kernel=kernel,
                scratch=scratch,
            )
            return batch.output

        return call


class Triton(AttentionKernel):
    """vLLM's unified attention, split over the context as the TRITON_ATTN backend asks for it.

    The backend moves its threshold to the nearest capture size of the engine; here it is the backend's own.
    """

    name = names.TRITON
    _BACKEND = "vllm.v1.attention.backends.triton_attn"
    _KERNEL = "vllm.v1.attention.ops.triton_unified_attention"
    modules = (_BACKEND, _KERNEL)

    def prepare(self, batch: Batch) -> Call:
        backend = importlib.import_module(self._BACKEND)
        unified: Callable[..., Any] = importlib.import_module(self._KERNEL).unified_attention
        case, device = batch.case, batch.query.device
        # The backend's own numbers: below that many requests the context is split into so many segments.
        threshold = backend.MIN_LAUNCH_GRID_SIZE_2D // case.kv_heads
        segments = backend.NUM_PAR_SOFTMAX_SEGMENTS
        padded = 1 << (case.head_size - 1).bit_length()
        rows = (threshold, case.heads, segments)
        one = torch.ones(1, dtype=torch.float32, device=device).expand(case.batch, case.kv_heads)
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
            "k_descale": one,
            "v_descale": one,
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(*rows, padded, dtype=torch.float32, device=device),
            "softmax_segm_max": torch.empty(rows, dtype=torch.float32, device=device),
            "softmax_segm_expsum": torch.empty(rows, dtype=torch.float32, device=device),
        }
        # Versions before the split by segments lack the last five; what later ones add has defaults.
        known = inspect.signature(unified).parameters
        chosen = {name: value for name, value in arguments.items() if name in known}

        def call() -> Any:
            unified(**chosen)
            return batch.output

        return call


class FlashAttention(AttentionKernel):
    """vLLM's FlashAttention of one version, on the paged cache or on contiguous keys and values."""

    def __init__(self, name: str, version: int, largest: int, *, paged: bool = True) -> None:
        self.name, self._version, self._largest, self._paged = name, version, largest, paged

    def missing(self) -> str | None:
        interface = "vllm.vllm_flash_attn.flash_attn_interface"
        # That version 4 is supported says only that its file exists.
        needed = (interface, "vllm.vllm_flash_attn.cute.interface") if self._version == 4 else (interface,)
        if (reason := unimportable(*needed)) is not None:
            return reason
        module = importlib.import_module(interface)
        if module.is_fa_version_supported(self._version):
            return None
        return str(module.fa_version_unsupported_reason(self._version))

    def refuses(self, case: AttentionCase) -> str | None:
        if case.head_size > self._largest:
            return f"FlashAttention {self._version} has head sizes up to {self._largest}"
        return None

    def prepare(self, batch: Batch) -> Call:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        case, longest = batch.case, max(batch.case.lengths)
        if self._paged:
            where = {
                "k": batch.keys,
                "v": batch.values,
                "seqused_k": batch.seq_lens,
                "block_table": batch.block_table,
            }
        else:
            keys, values = contiguous(batch)
            where = {"k": keys, "v": values, "cu_seqlens_k": _starts(case.lengths, keys.device)}

        def call() -> Any:
            flash_attn_varlen_func(
                q=batch.query,
                out=batch.output,
                cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=case.query,
                max_seqlen_k=longest,
                softmax_scale=batch.scale,
                causal=True,
                fa_version=self._version,
                **where,
            )
            return batch.output

        return call


class FlashInfer(AttentionKernel):
    """FlashInfer's paged prefill wrapper, which also takes a few query tokens; one plan for each set of inputs."""

    name = names.FLASHINFER
    modules = ("flashinfer",)
    _WORKSPACE = 256 << 20

    def __init__(self) -> None:
        self._workspace: Any = None

    def prepare(self, batch: Batch) -> Call:
        flashinfer: Any = importlib.import_module("flashinfer")
        case, device = batch.case, batch.query.device
        if self._workspace is None:
            self._workspace = torch.empty(self._WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper.plan(
            batch.query_start_loc,
            _starts(case.pages, device),
            torch.cat([row[:pages] for row, pages in zip(batch.block_table, case.pages, strict=True)]),
            (batch.seq_lens - 1) % case.page + 1,
            case.heads,
            case.kv_heads,
            case.head_size,
            case.page,
            causal=True,
            sm_scale=batch.scale,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

        def call() -> Any:
            wrapper.run(batch.query, (batch.keys, batch.values), out=batch.output)
            return batch.output

        return call


def contiguous(batch: Batch) -> tuple[Any, Any]:
    """The keys and values of all requests one after the other, ``[sum of lengths, kv_heads, head_size]``."""
    parts = [batch.gathered(request) for request in range(batch.case.batch)]
    return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])


def _starts(counts: Sequence[int], device: Any) -> Any:
    """Where each request begins and the last one ends, ``[batch + 1]`` int32."""
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=device)
