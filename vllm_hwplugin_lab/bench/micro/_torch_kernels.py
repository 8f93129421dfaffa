# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention on contiguous keys and values: SDPA, and FlexAttention as vLLM's backend runs it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from . import _attention_cases as names
from ._attention_cases import AttentionCase
from ._attention_inputs import Batch
from ._attention_kernels import AttentionKernel, contiguous
from ._timer import Call


class Sdpa(AttentionKernel):
    """``scaled_dot_product_attention``: PyTorch chooses the kernel.

    With ``repeated`` the heads of keys and values are repeated before the clock starts, which opens kernels that cannot
    do grouped queries.
    """

    def __init__(self, name: str, *, repeated: bool) -> None:
        self.name, self._repeated = name, repeated

    def refuses(self, case: AttentionCase) -> str | None:
        # Its causal mask begins at the first key.
        return None if set(case.lengths) == {case.query} else "its causal flag is for queries as long as the keys"

    def prepare(self, batch: Batch) -> Call:
        case = batch.case
        keys, values = contiguous(batch)
        if self._repeated:
            group = case.heads // case.kv_heads
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        query, key, value = (
            tensor.unflatten(0, (case.batch, -1)).transpose(1, 2).contiguous() for tensor in (batch.query, keys, values)
        )

        def call() -> Any:
            found = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=batch.scale, enable_gqa=not self._repeated
            )
            return found.transpose(1, 2).flatten(0, 1)

        return call


class Flex(AttentionKernel):
    """FlexAttention, compiled, with the block sizes and kernel options of vLLM's FLEX_ATTENTION backend.

    The backend masks the whole paged cache; here the same tokens lie side by side, which spares the kernel the way
    through the block table. The copy of the result into the layer's output is part of the backend and not of this.
    """

    name = names.FLEX
    _BACKEND = "vllm.v1.attention.backends.flex_attention"
    modules = (_BACKEND,)

    def refuses(self, case: AttentionCase) -> str | None:
        return None if set(case.lengths) == {case.query} else "measured for prefill only"

    def prepare(self, batch: Batch) -> Call:
        backend = importlib.import_module(self._BACKEND)
        case = batch.case
        keys, values = contiguous(batch)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (batch.query, keys, values))
        block = (int(backend.FlexAttentionMetadata.q_block_size), case.page)
        mask = _mask(case.batch, case.query, block, str(query.device))
        options = backend.get_kernel_options(query, *block, True)

        def call() -> Any:
            found = backend.flex_attention_compiled(
                query,
                key,
                value,
                None,
                mask,
                batch.scale,
                enable_gqa=case.kv_heads != case.heads,
                kernel_options=options,
            )
            return found[0].transpose(0, 1)

        return call


@cache
def _mask(requests: int, length: int, block: tuple[int, int], device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal_in_its_request(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query // length == key // length) & (query >= key)

    tokens = requests * length
    return create_block_mask(causal_in_its_request, None, None, tokens, tokens, device=device, BLOCK_SIZE=block)


def prefill_kernels() -> tuple[Sdpa, Sdpa, Flex]:
    return Sdpa(names.SDPA, repeated=False), Sdpa(names.SDPA_REPEATED, repeated=True), Flex()
