# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding as drafters and targets call it, on any device: nine shapes, in three modes.

Compared bit for bit with vLLM's own ``RotaryEmbedding.forward_static`` on the same device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .operation_checks import replay_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODES = ["eager", "captured", "replayed"]
MAX_POSITION = 4096

# Heads of query and of key, head size, rotated elements, tokens: what tensor parallelism leaves to one rank of the
# models that this was written for. The larger numbers of tokens are those of a prefill.
SHAPES = {
    "Eagle3 draft, TP8": (3, 1, 128, 128, 1),
    "Eagle3 draft, TP8, prefill": (3, 1, 128, 128, 257),
    "MiniMax-M2.5, TP8": (6, 1, 128, 64, 4),
    "MiniMax-M2.5, TP8, prefill": (6, 1, 128, 64, 20000),
    "Qwen3-8B-FP8, TP8": (4, 1, 128, 128, 8),
    "Qwen3-30B-A3B-FP8, TP2": (16, 2, 128, 128, 16),
    "Qwen3-30B-A3B-FP8, TP2, prefill": (16, 2, 128, 128, 4096),
    "one query head": (1, 1, 128, 128, 2),
    "two query heads": (2, 1, 128, 128, 33),
}

#: As vLLM declares its operation.
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, bool], None]

_BITS = {2: torch.int16, 4: torch.int32}


@functools.cache
def cache(rotary_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(MAX_POSITION, device=device, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN a NaN is."""
    bits = _BITS[found.element_size()]
    equal = found.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((equal | (found.isnan() & expected.isnan())).all())


class Call:
    """The arguments as vLLM has them: query and key are slices of one tensor that holds the values too."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, neox: bool, device: str, rotate: Rotate
    ) -> None:
        heads, kv_heads, self.head_size, self.rotary_dim, tokens = shape
        self.neox, self.device, self.rotate = neox, device, rotate
        self.sizes = [heads * self.head_size, kv_heads * self.head_size, kv_heads * self.head_size]
        self.qkv = torch.empty(tokens, sum(self.sizes), dtype=dtype, device=device)
        self.positions = torch.empty(tokens, dtype=torch.int64, device=device)
        self.cache = cache(self.rotary_dim, dtype, device)

    def refill(self) -> None:
        self.qkv.normal_(std=8.0)
        # Position 0 rotates nothing, which a single token must not be.
        self.positions.random_(1, MAX_POSITION)

    def expected(self) -> torch.Tensor:
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        query, key, value = self.qkv.split(self.sizes, dim=-1)
        rotated: Any = RotaryEmbedding.forward_static(
            self.positions, query, key, self.head_size, self.rotary_dim, self.cache, self.neox
        )
        return torch.cat([*rotated, value], dim=-1)

    def run(self) -> None:
        query, key, _ = self.qkv.split(self.sizes, dim=-1)
        self.rotate(self.positions, query, key, self.head_size, self.cache, self.neox)

    def check(self, mode: str, replays: int) -> None:
        """Compares the whole tensor, so that values and whatever is not rotated have to be as they were.

        Args:
            mode: one of ``MODES``.
            replays: of the mode ``replayed``, each on new data.
        """
        self.refill()
        run = self.run if mode == "eager" else replay_of(self.run, self.device)
        for _ in range(replays if mode == "replayed" else 1):
            self.refill()
            expected, before = self.expected(), self.qkv.clone()
            run()
            assert same(self.qkv, expected)
            assert not torch.equal(self.qkv, before)
