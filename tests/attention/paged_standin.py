# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the plugin's paged attention kernel, which needs a GPU: float64, page by page."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .reference import attention


class Kernel:
    """For a device, which it knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Arguments(SimpleNamespace):
    """The fields of the kernel's."""

    def __init__(self, query: Any, keys: Any, values: Any, out: Any, **more: Any) -> None:
        super().__init__(query=query, keys=keys, values=values, out=out, **more)


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
        given: Arguments, *, max_query_len: int, kernel: Kernel, scratch: Scratch, batch_invariant: bool
    ) -> None:
        if calls is not None:
            calls.append({"causal": given.causal, "scratch": scratch, "batch_invariant": batch_invariant})
        assert kernel.device == scratch.device
        assert max_query_len >= int(given.query_start_loc.diff().max())
        assert len(given.query_start_loc) == len(given.seq_lens) + 1
        assert given.query.shape == given.out.shape
        sinks = given.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and not sinks.requires_grad)
        found = attention(
            given.query,
            given.keys,
            given.values,
            given.query_start_loc,
            given.seq_lens,
            given.block_table,
            softmax_scale=given.scale,
            causal=given.causal,
            window_size=given.window,
            softcap=given.softcap,
            sinks=sinks,
        )
        given.out.copy_(found)

    def refuse(head_size: int, dtype: Any, kv_dtype: Any, block_size: int) -> str | None:
        return refuses

    def refuse_heads(num_heads: int, num_kv_heads: int) -> str | None:
        return "too many query heads" if num_heads > 64 * num_kv_heads else None

    module.Arguments = Arguments  # type: ignore[attr-defined]
    module.paged_attention = paged_attention  # type: ignore[attr-defined]
    module.kernel_for = Kernel  # type: ignore[attr-defined]
    module.Scratch = Scratch  # type: ignore[attr-defined]
    module.refuse = refuse  # type: ignore[attr-defined]
    module.refuse_heads = refuse_heads  # type: ignore[attr-defined]
    return module
