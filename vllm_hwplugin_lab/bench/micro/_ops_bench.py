# SPDX-License-Identifier: Apache-2.0
"""``bench ops`` on the device: parity and time of the plugin's operation, or of vLLM's own of the same name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_hwplugin.ops.definitions import is_defined

from . import _op_cases as cases
from . import _op_inputs
from ._timer import Copies, Missing, Timer, needed

#: Bytes that all sets of inputs of a cell may take.
_ROOM = 24 << 30
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
        sets = [_op_inputs.arguments(case, self._timer.device, self._random) for _ in range(count)]
        more = trailing(run, len(case.arguments))
        chosen = _op_inputs.rows(case, self._choice)
        right = _op_inputs.on_cpu(case, sets[0], chosen)
        reference(case.op)(*right)
        run(*sets[0], *more)
        wrong = _op_inputs.mismatch(case, sets[0], right, chosen)
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
