# SPDX-License-Identifier: Apache-2.0
"""The operations under vLLM's names: arguments, shapes and bytes moved per launch.

Arguments follow the operations' schemas in vLLM 0.20.2 (``vllm/_custom_ops.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from ._supervise import Cell

OURS = "hwplugin"
VLLM = "vllm"

SMALL = "small"
LARGE = "large"
#: Numbers of tokens: latency bounds the small ones, bandwidth the large ones.
TOKENS = {1: SMALL, 8: SMALL, 64: SMALL, 8192: LARGE, 65536: LARGE}

SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int32": 4, "int64": 8}
#: Rows of the table that positions index.
POSITIONS = 40960


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    Attributes:
        role: ``in``: read once; ``out``: written once; ``inout``: both.
        fill: The values of an input; outputs are spoiled instead.
        token_dim: The dimension of the tokens; None: shared by all tokens.
        used: Elements that a launch touches; None: all.
        transposed: Whether the memory order of the matrix has swapped dimensions.
        tolerance: Allowed error, relative to the larger of the reference value and a quarter of the outputs' root mean
            square; 0: equality. It finds a wrong kernel; the operation's tests are stricter. None: the output depends
            on the number of tokens in the batch, so single rows cannot be compared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Literal["in", "out", "inout"]
    fill: Literal["normal", "near one", "positions", "cos sin"] = "normal"
    token_dim: int | None = 0
    used: int | None = None
    transposed: bool = False
    tolerance: float | None = 0.0

    @property
    def bytes_moved(self) -> int:
        elements = math.prod(self.shape) if self.used is None else self.used
        return elements * SIZES[self.dtype] * (2 if self.role == "inout" else 1)


@dataclass(frozen=True)
class OpCase:
    """An operation on a shape; ``arguments`` in the schema's order, other than ``Operand`` passed unchanged."""

    op: str
    shape: str
    tokens: int
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        return f"{self.op} {self.shape} t{self.tokens}"

    @property
    def size(self) -> str:
        return TOKENS[self.tokens]

    @property
    def bytes_moved(self) -> int:
        """Bytes moved if each input is read once and each output written once."""
        return sum(argument.bytes_moved for argument in self.arguments if isinstance(argument, Operand))


#: Relative rounding errors of the types, a few units in the last place.
_BF16 = 4 * 2.0**-8
_FP8 = 2.0**-3
_SCALE = 2.0**-6
_F32 = 1e-5


def _qk_norm_rope(tokens: int, heads: int, kv_heads: int, head: int) -> tuple[Any, ...]:
    row = (heads + 2 * kv_heads) * head
    weights = (
        Operand(name, (head,), "bfloat16", "in", "near one", token_dim=None) for name in ("q_weight", "k_weight")
    )
    used = min(tokens, POSITIONS) * head
    return (
        # The values are not touched.
        Operand("qkv", (tokens, row), "bfloat16", "inout", used=tokens * (heads + kv_heads) * head, tolerance=_BF16),
        heads,
        kv_heads,
        kv_heads,
        head,
        1e-6,
        *weights,
        Operand("cos_sin_cache", (POSITIONS, head), "bfloat16", "in", "cos sin", token_dim=None, used=used),
        True,
        Operand("position_ids", (tokens,), "int64", "in", "positions"),
    )


def _rope(tokens: int, heads: int, kv_heads: int, head: int) -> tuple[Any, ...]:
    used = min(tokens, POSITIONS) * head
    return (
        Operand("positions", (tokens,), "int64", "in", "positions"),
        Operand("query", (tokens, heads * head), "bfloat16", "inout", tolerance=_BF16),
        Operand("key", (tokens, kv_heads * head), "bfloat16", "inout", tolerance=_BF16),
        head,
        Operand("cos_sin_cache", (POSITIONS, head), "bfloat16", "in", "cos sin", token_dim=None, used=used),
        True,
    )


def _silu_quant(tokens: int, hidden: int, group: int, transposed: bool) -> tuple[Any, ...]:
    scales = (tokens, hidden // group)
    return (
        Operand("out", (tokens, hidden), "float8_e4m3fn", "out", tolerance=_FP8),
        Operand("input", (tokens, 2 * hidden), "bfloat16", "in"),
        Operand("scales", scales, "float32", "out", transposed=transposed, tolerance=_SCALE),
        group,
        None,
        transposed,
    )


def _rms_quant(tokens: int, hidden: int, residual: bool) -> tuple[Any, ...]:
    return (
        Operand("result", (tokens, hidden), "float8_e4m3fn", "out", tolerance=_FP8),
        Operand("input", (tokens, hidden), "bfloat16", "in"),
        Operand("weight", (hidden,), "bfloat16", "in", "near one", token_dim=None),
        Operand("scale", (tokens, 1), "float32", "out", tolerance=_SCALE),
        1e-6,
        None,
        Operand("residual", (tokens, hidden), "bfloat16", "inout", tolerance=_BF16) if residual else None,
    )


def _merge(tokens: int, heads: int, head: int) -> tuple[Any, ...]:
    def pair(states: str, sums: str, role: Literal["in", "out"]) -> tuple[Operand, Operand]:
        return (
            Operand(states, (tokens, heads, head), "bfloat16", role, tolerance=_BF16),
            Operand(sums, (heads, tokens), "float32", role, token_dim=1, tolerance=_F32),
        )

    given = (pair(f"{part}_output", f"{part}_lse", "in") for part in ("prefix", "suffix"))
    return *pair("output", "output_lse", "out"), *chain(*given), None


def _topk(tokens: int, experts: int, top: int, dtype: str) -> tuple[Any, ...]:
    return (
        Operand("topk_weights", (tokens, top), "float32", "out", tolerance=_F32),
        Operand("topk_indices", (tokens, top), "int32", "out"),
        Operand("token_expert_indices", (tokens, top), "int32", "out", tolerance=None),
        Operand("gating_output", (tokens, experts), dtype, "in"),
        True,
        None,
    )


#: Operation -> name of the shape -> its arguments for a number of tokens.
_SHAPES: dict[str, dict[str, Callable[[int], tuple[Any, ...]]]] = {
    "fused_qk_norm_rope": {
        "32/8 heads of 128": lambda tokens: _qk_norm_rope(tokens, 32, 8, 128),
        "8/1 heads of 128": lambda tokens: _qk_norm_rope(tokens, 8, 1, 128),
    },
    "silu_and_mul_per_block_quant": {
        "12288, groups of 128": lambda tokens: _silu_quant(tokens, 12288, 128, False),
        "1536, groups of 128, transposed scales": lambda tokens: _silu_quant(tokens, 1536, 128, True),
    },
    "rms_norm_dynamic_per_token_quant": {
        "4096": lambda tokens: _rms_quant(tokens, 4096, False),
        "4096 with residual": lambda tokens: _rms_quant(tokens, 4096, True),
    },
    "merge_attn_states": {
        "32 heads of 128": lambda tokens: _merge(tokens, 32, 128),
        "8 heads of 128": lambda tokens: _merge(tokens, 8, 128),
    },
    "rotary_embedding": {
        "32/8 heads of 128": lambda tokens: _rope(tokens, 32, 8, 128),
    },
    "topk_softmax": {
        "8 of 128": lambda tokens: _topk(tokens, 128, 8, "float32"),
        "8 of 128, bfloat16": lambda tokens: _topk(tokens, 128, 8, "bfloat16"),
        "6 of 64": lambda tokens: _topk(tokens, 64, 6, "float32"),
    },
}

OPS = tuple(_SHAPES)
#: Operations that memory does not bound, and what does.
NOT_BY_MEMORY = {"topk_softmax": "k selections in each row bound it, not memory"}
CASES = {
    case.key: case
    for case in (
        OpCase(op, shape, tokens, arguments(tokens))
        for op, shapes in _SHAPES.items()
        for shape, arguments in shapes.items()
        for tokens in TOKENS
    )
}


def plan() -> tuple[Cell, ...]:
    """Return all cells.

    The kernels of a case are adjacent, so that a changing clock affects them equally.
    """
    return tuple((kernel, key) for key in CASES for kernel in (OURS, VLLM))
