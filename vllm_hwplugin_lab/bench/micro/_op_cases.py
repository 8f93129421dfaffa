# SPDX-License-Identifier: Apache-2.0
"""The operations that stand under vLLM's names: their arguments, their shapes and the bytes that a launch moves.

The arguments are those of the operations' schemas in vLLM 0.20.2 (``vllm/_custom_ops.py``), in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ._supervise import Cell

OURS = "hwplugin"
VLLM = "vllm"
#: vLLM's operation with the table of cosines in float32. vLLM's layer passes it in the model's type, and the operation
#: of 0.20.0 to 0.20.2 converts all of it in every call (csrc/pos_encoding_kernels.cu); later ones read it as it is.
VLLM_FLOAT32 = "vllm, float32 table"
TABLE = "cos_sin_cache"

SMALL = "small"
LARGE = "large"
#: Tokens: a few, where latency counts, and many, where bandwidth does.
TOKENS = {1: SMALL, 8: SMALL, 64: SMALL, 8192: LARGE, 65536: LARGE}

SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int32": 4, "int64": 8}

#: How an input is filled; an output is spoiled instead.
Fill = Literal["normal", "near one", "positions", "cos sin", "spoiled"]


@dataclass(frozen=True)
class Pairs:
    """Which elements of a row are rotated together.

    Attributes:
        head: elements of a head, all of which are rotated.
        neox: the pairs are (i, i + head / 2), else (2i, 2i + 1).
    """

    head: int
    neox: bool


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    Attributes:
        role: ``in`` is read once, ``out`` written once, ``inout`` both.
        token_dim: which dimension is the tokens', None for what all tokens share.
        used: elements that a launch touches, where that is not all of them.
        row_stride: elements from one token to the next, where the tensor is a slice of a wider one.
        transposed: memory order of a matrix with its dimensions swapped.
        tolerance: how far an output may be from the reference, relative to the larger of the right value and a quarter
            of the outputs' root mean square; 0 for equality. It finds a wrong kernel; the operation's own tests are
            stricter.
        pairs: where an output is a rotation, whose terms can cancel: the tolerance is relative to the length of a pair.
        exact: the plugin's own kernel has to equal the reference; the tolerance is for vLLM's.
        by_position: its values depend on the row's number in the whole batch, so that single rows say nothing.
        limit: of positions: the number of rows of the table that they point into.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Literal["in", "out", "inout"]
    fill: Fill = "normal"
    token_dim: int | None = 0
    used: int | None = None
    row_stride: int | None = None
    transposed: bool = False
    tolerance: float = 0.0
    pairs: Pairs | None = None
    exact: bool = False
    by_position: bool = False
    limit: int = 0

    @property
    def bytes_moved(self) -> int:
        elements = math.prod(self.shape) if self.used is None else self.used
        return elements * SIZES[self.dtype] * (2 if self.role == "inout" else 1)


@dataclass(frozen=True)
class OpCase:
    """One operation on one shape.

    Attributes:
        arguments: in the schema's order; what is no ``Operand`` is passed as it is.
    """

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
    def rivals(self) -> tuple[str, ...]:
        """vLLM's operation, once for each way of calling it; the fastest is what the plugin's is compared with."""
        return (VLLM, VLLM_FLOAT32) if self.op in FLOAT32_TABLE else (VLLM,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(one for one in self.arguments if isinstance(one, Operand))

    @property
    def bytes_moved(self) -> int:
        """Each input read once and each output written once."""
        return sum(one.bytes_moved for one in self.operands)


#: Relative errors that rounding to the type explains, a few units in the last place.
_BF16 = 4 * 2.0**-8
_FP8 = 2.0**-3
_SCALE = 2.0**-6
_F32 = 1e-5

#: Of the length of a pair. Rounding to bfloat16 moves a number by 2**-8 of itself at most. The reference rounds both
#: products and then their sum: |x cos| + |y sin| is no more than the length (Cauchy and Schwarz), so the products cost
#: 2**-8 of it at most, however much of their sum cancels, and rounding the sum as much again. vLLM's kernel computes
#: in float32 and rounds once: another 2**-8. The eighth is for cosines and sines that are rounded themselves, and for
#: terms of second order.
_PAIR = 3.125 * 2.0**-8

_POSITIONS = 40960


def _cos_sin(tokens: int, rotary_dim: int) -> Operand:
    used = min(tokens, _POSITIONS) * rotary_dim
    return Operand(TABLE, (_POSITIONS, rotary_dim), "bfloat16", "in", "cos sin", token_dim=None, used=used)


def _positions(name: str, tokens: int) -> Operand:
    return Operand(name, (tokens,), "int64", "in", "positions", limit=_POSITIONS)


def _rotary(tokens: int, heads: int, kv_heads: int, head: int, neox: bool) -> tuple[Any, ...]:
    # As in a model: slices of the projection's output.
    row = (heads + 2 * kv_heads) * head
    query, key = (
        Operand(
            name,
            (tokens, count * head),
            "bfloat16",
            "inout",
            row_stride=row,
            tolerance=_PAIR,
            pairs=Pairs(head, neox),
            exact=True,
        )
        for name, count in (("query", heads), ("key", kv_heads))
    )
    return _positions("positions", tokens), query, key, head, _cos_sin(tokens, head), neox


def _qk_norm_rope(tokens: int, heads: int, kv_heads: int, head: int) -> tuple[Any, ...]:
    row = (heads + 2 * kv_heads) * head
    used = tokens * (heads + kv_heads) * head
    weights = tuple(
        Operand(name, (head,), "bfloat16", "in", "near one", token_dim=None) for name in ("q_weight", "k_weight")
    )
    return (
        Operand("qkv", (tokens, row), "bfloat16", "inout", used=used, tolerance=_BF16),
        heads,
        kv_heads,
        kv_heads,
        head,
        1e-6,
        *weights,
        _cos_sin(tokens, head),
        True,
        _positions("position_ids", tokens),
    )


def _silu_quant(tokens: int, hidden: int, group: int, transposed: bool) -> tuple[Any, ...]:
    return (
        Operand("out", (tokens, hidden), "float8_e4m3fn", "out", "spoiled", tolerance=_FP8),
        Operand("input", (tokens, 2 * hidden), "bfloat16", "in"),
        Operand(
            "scales",
            (tokens, hidden // group),
            "float32",
            "out",
            "spoiled",
            transposed=transposed,
            tolerance=_SCALE,
        ),
        group,
        None,
        transposed,
    )


def _rms_quant(tokens: int, hidden: int, residual: bool) -> tuple[Any, ...]:
    return (
        Operand("result", (tokens, hidden), "float8_e4m3fn", "out", "spoiled", tolerance=_FP8),
        Operand("input", (tokens, hidden), "bfloat16", "in"),
        Operand("weight", (hidden,), "bfloat16", "in", "near one", token_dim=None),
        Operand("scale", (tokens, 1), "float32", "out", "spoiled", tolerance=_SCALE),
        1e-6,
        None,
        Operand("residual", (tokens, hidden), "bfloat16", "inout", tolerance=_BF16) if residual else None,
    )


def _merge(tokens: int, heads: int, head: int) -> tuple[Any, ...]:
    def states(name: str, role: Literal["in", "out"], fill: Fill) -> Operand:
        return Operand(name, (tokens, heads, head), "bfloat16", role, fill, tolerance=_BF16)

    def sums(name: str, role: Literal["in", "out"], fill: Fill) -> Operand:
        return Operand(name, (heads, tokens), "float32", role, fill, token_dim=1, tolerance=_F32)

    return (
        states("output", "out", "spoiled"),
        sums("output_lse", "out", "spoiled"),
        states("prefix_output", "in", "normal"),
        sums("prefix_lse", "in", "normal"),
        states("suffix_output", "in", "normal"),
        sums("suffix_lse", "in", "normal"),
        None,
    )


def _topk(tokens: int, experts: int, top: int, dtype: str) -> tuple[Any, ...]:
    return (
        Operand("topk_weights", (tokens, top), "float32", "out", "spoiled", tolerance=_F32),
        Operand("topk_indices", (tokens, top), "int32", "out", "spoiled"),
        Operand("token_expert_indices", (tokens, top), "int32", "out", "spoiled", by_position=True),
        Operand("gating_output", (tokens, experts), dtype, "in"),
        True,
        None,
    )


#: Operation -> name of the shape -> its arguments for a number of tokens.
_SHAPES: dict[str, dict[str, Callable[[int], tuple[Any, ...]]]] = {
    "rotary_embedding": {
        "32/8 heads of 128": lambda tokens: _rotary(tokens, 32, 8, 128, True),
        "4/1 heads of 128": lambda tokens: _rotary(tokens, 4, 1, 128, True),
        "32/8 heads of 128, GPT-J": lambda tokens: _rotary(tokens, 32, 8, 128, False),
    },
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
    "topk_softmax": {
        "8 of 128": lambda tokens: _topk(tokens, 128, 8, "float32"),
        "8 of 128, bfloat16": lambda tokens: _topk(tokens, 128, 8, "bfloat16"),
        "6 of 64": lambda tokens: _topk(tokens, 64, 6, "float32"),
    },
}

OPS = tuple(_SHAPES)
#: Operations whose rival is measured with a table in float32 as well.
FLOAT32_TABLE = ("rotary_embedding",)
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
    """Every cell; the kernels of a case stand side by side, so that a clock that changes treats them alike."""
    return tuple((kernel, key) for key, case in CASES.items() for kernel in (OURS, *case.rivals))
