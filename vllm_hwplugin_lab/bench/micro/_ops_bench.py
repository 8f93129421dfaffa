# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of an operation of the plugin or of vLLM."""

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

#: Most bytes of a cell's sets of inputs.
_ROOM = 24 << 30
#: Rows to compare: the first, the last, and random ones.
_ROWS = 64
#: Namespaces of vLLM's operations, in every version.
_NAMESPACES = ("_C", "_moe_C")


class OpsBench:
    def __init__(self, timer: Timer, copies: Copies, seed: int) -> None:
        self._timer, self._copies = timer, copies
        self._random = torch.Generator(device=timer.device).manual_seed(seed)
        self._choice = torch.Generator().manual_seed(seed)

    def measure(self, kernel: str, key: str) -> dict[str, Any]:
        """Measure a cell's time and parity; raise Missing without a kernel."""
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
    """Return the plugin's operation, which runs its reference on CPU tensors."""
    importlib.import_module(f"vllm_hwplugin.ops.{op}")
    operation: Callable[..., Any] = getattr(torch.ops.hwplugin, op)
    return operation


def implementation(kernel: str, op: str) -> Callable[..., Any]:
    """Return the plugin's (which may build it) or vLLM's operation; raises Missing."""
    if kernel != cases.OURS:
        needed("vllm._custom_ops")
        for namespace in _NAMESPACES:
            operation: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), op, None)
            if operation is not None and not is_defined(op):
                return operation
        raise Missing(f"this vLLM has no operation {op}")
    from vllm_hwplugin.ops.compile import jit, torch_build
    from vllm_hwplugin.ops.compile.spec import KERNELS, KernelUnavailable

    try:
        jit.provide(KERNELS[op], torch_build.installed())
    except KernelUnavailable as error:
        raise Missing(str(error)) from error
    if not jit.ensure(KERNELS[op]):
        raise Missing("its library was built but cannot be loaded; the log has the error")
    return reference(op)


def trailing(run: Any, given: int) -> list[None]:
    """Return None for each required argument after the first ``given``.

    Later versions of vLLM add such arguments.

    Raises:
        ValueError: An argument cannot be None.
    """
    more = [argument for argument in run.default._schema.arguments[given:] if not argument.has_default_value()]
    if odd := [argument.name for argument in more if not isinstance(argument.type, torch.OptionalType)]:
        raise ValueError(f"this vLLM's {run.default._schema} also needs {', '.join(odd)}")
    return [None] * len(more)


def arguments(case: OpCase, device: Any, random: Any) -> list[Any]:
    """Draw the arguments in the schema's order from the generator ``random``."""
    return [_tensor(value, device, random) if isinstance(value, Operand) else value for value in case.arguments]


def rows(case: OpCase, random: Any) -> Any:
    """Return the tokens to compare: all of few, else a sample."""
    if case.tokens <= _ROWS:
        return torch.arange(case.tokens)
    ends = torch.tensor([0, case.tokens - 1])
    return torch.cat([ends, torch.randint(case.tokens, (_ROWS - 2,), generator=random)]).unique()


def on_cpu(case: OpCase, values: Sequence[Any], chosen: Any) -> list[Any]:
    """Copy the chosen tokens of the arguments to the CPU."""
    return [
        _pick(argument, value, chosen) if isinstance(argument, Operand) else value
        for argument, value in zip(case.arguments, values, strict=True)
    ]


def mismatch(case: OpCase, values: Sequence[Any], reference: Sequence[Any], chosen: Any) -> str | None:
    """Return where an output exceeds its tolerance; None: nowhere."""
    for operand, value, right in zip(case.arguments, values, reference, strict=True):
        if not isinstance(operand, Operand) or operand.role == "in" or operand.tolerance is None:
            continue
        output, wanted = _pick(operand, value, chosen).double(), right.double()
        scale = wanted.abs().clamp(min=float(wanted.square().mean().sqrt()) / 4)
        # Negated, so that a NaN is wrong.
        wrong = ~((output - wanted).abs() <= operand.tolerance * scale)
        if bool(wrong.any()):
            at = tuple(int(index) for index in wrong.nonzero()[0])
            return (
                f"{operand.name}: {int(wrong.sum())} of {wrong.numel()} compared values are wrong; at {list(at)} "
                f"found {float(output[at]):.6g}, expected {float(wanted[at]):.6g}"
            )
    return None


def _pick(operand: Operand, value: Any, chosen: Any) -> Any:
    if operand.token_dim is None:
        return value.detach().to("cpu", copy=True)
    # As bytes, because not every PyTorch selects rows of float8.
    plain = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    picked = plain.index_select(operand.token_dim, chosen.to(value.device)).cpu().view(value.dtype)
    return picked.T.contiguous().T if operand.transposed else picked


def _tensor(operand: Operand, device: Any, random: Any) -> Any:
    dtype = getattr(torch, operand.dtype)
    if operand.role == "out":
        # NaN in each float type (0xFF in e4m3), and -1 in integer types.
        output = torch.empty(operand.shape, dtype=dtype, device=device)
        output.view(torch.uint8).fill_(0xFF)
        return output.T.contiguous().T if operand.transposed else output
    if operand.fill == "positions":
        # Positions are random in decodes, consecutive in prefills.
        few = operand.shape[0] <= _ROWS
        start = torch.randint(POSITIONS, operand.shape if few else (1,), generator=random, device=device)
        return start if few else (start + torch.arange(operand.shape[0], device=device)) % POSITIONS
    drawn = torch.empty(operand.shape, dtype=dtype, device=device).normal_(generator=random)
    if operand.fill == "near one":
        return 1 + drawn / 8
    if operand.fill == "cos sin":
        angles = drawn[:, : operand.shape[1] // 2].float() * 100
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    return drawn
