# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of the plugin's operation, or of vLLM's own of the same name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_hwplugin.ops.definitions import is_defined

from . import _op_cases as cases
from ._op_cases import POSITIONS, OpCase, Operand
from ._supervise import Missing, needed
from ._timer import Copies, Timer

#: Bytes that all sets of inputs of a cell may take.
_ROOM = 24 << 30
#: Rows that are compared: the first, the last, and others at random.
_ROWS = 64
#: vLLM's libraries define their operations in these namespaces, in every version.
_NAMESPACES = ("_C", "_moe_C")


class OpsBench:
    def __init__(self, timer: Timer, copies: Copies, seed: int) -> None:
        self._timer, self._copies = timer, copies
        self._random = torch.Generator(device=timer.device).manual_seed(seed)
        self._choice = torch.Generator().manual_seed(seed)

    def measure(self, kernel: str, key: str) -> dict[str, Any]:
        """The time and the parity of a cell.

        Raises:
            Missing: the operation has no kernel on this side.
        """
        case = cases.CASES[key]
        run = implementation(kernel, case.op)
        count = self._timer.sets(case.bytes_moved, _ROOM)
        sets = [arguments(case, self._timer.device, self._random) for _ in range(count)]
        more = trailing(run, len(case.arguments))
        chosen = rows(case, self._choice)
        right = on_cpu(case, sets[0], chosen)
        reference(case.op)(*right)
        run(*sets[0], *more)
        wrong = mismatch(case, sets[0], right, chosen)
        facts, _ = self._timer.measure([partial(run, *values, *more) for values in sets])
        return {**facts, "copy_seconds": self._copies.seconds(case.bytes_moved), "mismatch": wrong}


def reference(op: str) -> Callable[..., Any]:
    """The plugin's operation, which runs its reference on tensors of the CPU."""
    importlib.import_module(f"vllm_hwplugin.ops.{op}")
    found: Callable[..., Any] = getattr(torch.ops.hwplugin, op)
    return found


def implementation(kernel: str, op: str) -> Callable[..., Any]:
    """The operation of one side. The first call for one of the plugin's may build its kernel.

    Raises:
        Missing: it has no kernel on this side.
    """
    if kernel != cases.OURS:
        needed("vllm._custom_ops")
        for namespace in _NAMESPACES:
            found: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), op, None)
            if found is not None and not is_defined(op):
                return found
        raise Missing(f"this vLLM has no operation {op}")
    from vllm_hwplugin.ops.compile import jit, torch_build
    from vllm_hwplugin.ops.compile.spec import KERNELS, KernelUnavailable

    try:
        jit.provide(KERNELS[op], torch_build.installed())
    except KernelUnavailable as error:
        raise Missing(str(error)) from error
    if not jit.ensure(KERNELS[op]):
        raise Missing("its library was built and cannot be loaded; the log says why")
    return reference(op)


def trailing(run: Any, given: int) -> list[None]:
    """What has to be passed after the first ``given`` arguments: later versions of vLLM have more without a default.

    Raises:
        ValueError: one of them cannot be None.
    """
    more = [one for one in run.default._schema.arguments[given:] if not one.has_default_value()]
    if odd := [one.name for one in more if not isinstance(one.type, torch.OptionalType)]:
        raise ValueError(f"this vLLM's {run.default._schema} also needs {', '.join(odd)}")
    return [None] * len(more)


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
