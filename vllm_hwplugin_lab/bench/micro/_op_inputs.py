# SPDX-License-Identifier: Apache-2.0
"""Arguments of an operation on a device, and the comparison of a few rows with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._op_cases import POSITIONS, OpCase, Operand

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


def mismatch(case: OpCase, values: Sequence[Any], reference: Sequence[Any], chosen: Any) -> str | None:
    """Where the kernel's outputs differ from the reference's by more than their tolerance; None if nowhere."""
    for one, value, right in zip(case.arguments, values, reference, strict=True):
        if not isinstance(one, Operand) or one.role == "in" or one.tolerance is None:
            continue
        found, wanted = _pick(one, value, chosen).double(), right.double()
        scale = wanted.abs().clamp(min=float(wanted.square().mean().sqrt()) / 4)
        # So that a NaN, which compares as false, is wrong.
        wrong = ~((found - wanted).abs() <= one.tolerance * scale)
        if bool(wrong.any()):
            at = tuple(int(index) for index in wrong.nonzero()[0])
            return (
                f"{one.name}: {int(wrong.sum())} of {wrong.numel()} compared values are wrong; at {list(at)} "
                f"{float(found[at]):.6g} instead of {float(wanted[at]):.6g}"
            )
    return None


def _pick(one: Operand, value: Any, chosen: Any) -> Any:
    if one.token_dim is None:
        return value.detach().to("cpu", copy=True)
    # By bytes where needed: not every PyTorch selects rows of float8.
    plain = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    picked = plain.index_select(one.token_dim, chosen.to(value.device)).cpu().view(value.dtype)
    return picked.T.contiguous().T if one.transposed else picked


def _tensor(one: Operand, device: Any, random: Any) -> Any:
    dtype = getattr(torch, one.dtype)
    if one.role == "out":
        # Not a number in each float type (0xFF in e4m3), and -1 where there is none.
        found = torch.empty(one.shape, dtype=dtype, device=device)
        found.view(torch.uint8).fill_(0xFF)
        return found.T.contiguous().T if one.transposed else found
    if one.fill == "positions":
        # Those of decodes lie anywhere, those of prefills one after the other.
        few = one.shape[0] <= _ROWS
        start = torch.randint(POSITIONS, one.shape if few else (1,), generator=random, device=device)
        return start if few else (start + torch.arange(one.shape[0], device=device)) % POSITIONS
    drawn = torch.empty(one.shape, dtype=dtype, device=device).normal_(generator=random)
    if one.fill == "near one":
        return 1 + drawn / 8
    if one.fill == "cos sin":
        angles = drawn[:, : one.shape[1] // 2].float() * 100
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    return drawn
