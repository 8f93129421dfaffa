# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the plugin's paged attention kernel, which needs a GPU: float64, page by page."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .reference import attention


class Kernel:
    """For a device, which it knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Scratch:
    """Takes no memory; knows which device it is for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    allocate = classmethod(lambda cls, device: cls(device))


def paged(calls: list[dict[str, Any]] | None = None, *, refuses: str | None = None) -> ModuleType:
    """The module; ``calls`` notes what the function is called with, ``refuses`` is what ``refuse`` says.

    More than 64 query heads of a KV head it refuses as the kernel does.
    """
    module = ModuleType("vllm_hwplugin.attention.paged")

    def paged_attention(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_query_len: int,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        sinks: torch.Tensor | None,
        kernel: Kernel,
        scratch: Scratch,
        batch_invariant: bool,
    ) -> None:
        if calls is not None:
            calls.append({"causal": causal, "scratch": scratch, "batch_invariant": batch_invariant})
        assert kernel.device == scratch.device
        assert max_query_len >= int(query_start_loc.diff().max())
        assert len(query_start_loc) == len(seq_lens) + 1
        assert query.shape == out.shape
        assert sinks is None or (sinks.dtype == torch.float32 and not sinks.requires_grad)
        found = attention(
            query,
            keys,
            values,
            query_start_loc,
            seq_lens,
            block_table,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            sinks=sinks,
        )
        out.copy_(found)

    def refuse(head_size: int, dtype: Any, kv_dtype: Any, block_size: int) -> str | None:
        return refuses

    def refuse_heads(num_heads: int, num_kv_heads: int) -> str | None:
        return "too many query heads" if num_heads > 64 * num_kv_heads else None

    module.paged_attention = paged_attention  # type: ignore[attr-defined]
    module.kernel_for = Kernel  # type: ignore[attr-defined]
    module.Scratch = Scratch  # type: ignore[attr-defined]
    module.refuse = refuse  # type: ignore[attr-defined]
    module.refuse_heads = refuse_heads  # type: ignore[attr-defined]
    return module
