# SPDX-License-Identifier: Apache-2.0
"""Arguments of an operation on a device, and the comparison of a few rows with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._op_cases import OpCase, Operand

#: Rows that are compared: the first, the last, and others at random.
_ROWS = 64


def arguments(case: OpCase, device: Any, random: Any) -> list[Any]:
    """The arguments in the schema's order, drawn from the generator ``random``."""
    return [_tensor(one, device, random) if isinstance(one, Operand) else one for one in case.arguments]


def rows(case: OpCase, random: Any) -> Any:
    """Which tokens are compared with the reference: all of a few, else a sample in rising order."""
    if case.tokens <= _ROWS:
        return torch.arange(case.tokens)
    ends = torch.tensor([0, case.tokens - 1])
    return torch.cat([ends, torch.randint(case.tokens, (_ROWS - 2,), generator=random)]).unique()


def on_cpu(case: OpCase, values: Sequence[Any], chosen: Any) -> list[Any]:
    """Copies of the arguments with the chosen tokens alone, for the reference."""
    return [
        _pick(one, value, chosen) if isinstance(one, Operand) else value
        for one, value in zip(case.arguments, values, strict=True)
    ]


def mismatch(
    case: OpCase, values: Sequence[Any], reference: Sequence[Any], chosen: Any, *, ours: bool = False
) -> str | None:
    """Where the kernel's outputs differ from the reference's by more than their tolerance; None if nowhere.

    Args:
        ours: the kernel is the plugin's, which some operands hold to equality.
    """
    for one, value, right in zip(case.arguments, values, reference, strict=True):
        if not isinstance(one, Operand) or one.role == "in":
            continue
        if one.by_position and len(chosen) < case.tokens:
            continue
        found, wanted = _pick(one, value, chosen).double(), right.double()
        error = (found - wanted).abs()
        tolerance = 0.0 if ours and one.exact else one.tolerance
        # So that a NaN, which compares as false, is wrong.
        wrong = ~(error <= tolerance * _scale(one, wanted))
        if bool(wrong.any()):
            at = tuple(int(index) for index in wrong.nonzero()[0])
            return (
                f"{one.name}: {int(wrong.sum())} of {wrong.numel()} compared values are wrong; at {list(at)} "
                f"{float(found[at]):.6g} instead of {float(wanted[at]):.6g}"
            )
    return None


def _scale(one: Operand, wanted: Any) -> Any:
    """What the tolerance is relative to. The length of a pair can be read off the result: a rotation keeps it."""
    if one.pairs is None:
        return wanted.abs().clamp(min=float(wanted.square().mean().sqrt()) / 4)
    heads = wanted.unflatten(-1, (-1, one.pairs.head))
    if one.pairs.neox:
        return torch.hypot(*heads.chunk(2, dim=-1)).repeat(1, 1, 2).flatten(-2)
    return torch.hypot(heads[..., ::2], heads[..., 1::2]).repeat_interleave(2, dim=-1).flatten(-2)


def _pick(one: Operand, value: Any, chosen: Any) -> Any:
    if one.token_dim is None:
        return value.detach().to("cpu", copy=True)
    # By bytes where needed: not every PyTorch selects rows of float8.
    plain = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    picked = plain.index_select(one.token_dim, chosen.to(value.device)).cpu()
    picked = picked.view(value.dtype) if plain is not value else picked
    return picked.T.contiguous().T if one.transposed else picked


def _tensor(one: Operand, device: Any, random: Any) -> Any:
    dtype = getattr(torch, one.dtype)
    if one.fill == "positions":
        return _positions(one, device, random)
    if one.fill == "spoiled":
        if dtype == torch.float8_e4m3fn:
            found = torch.full(one.shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)  # e4m3's NaN
        else:
            found = torch.full(one.shape, -1 if dtype == torch.int32 else torch.nan, dtype=dtype, device=device)
        return found.T.contiguous().T if one.transposed else found
    shape = one.shape if one.row_stride is None else (one.shape[0], one.row_stride)
    found = torch.empty(shape, dtype=dtype, device=device).normal_(generator=random)
    if one.fill == "near one":
        found = 1 + found / 8
    elif one.fill == "cos sin":
        half = shape[1] // 2
        angles = found[:, :half].float() * 100
        found = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    return found[:, : one.shape[1]] if one.row_stride is not None else found


def _positions(one: Operand, device: Any, random: Any) -> Any:
    """Those of decodes lie anywhere, those of prefills one after the other."""
    (tokens,) = one.shape
    if tokens <= _ROWS:
        return torch.randint(one.limit, (tokens,), generator=random, device=device)
    start = torch.randint(one.limit, (1,), generator=random, device=device)
    return (start + torch.arange(tokens, device=device)) % one.limit
