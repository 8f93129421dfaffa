# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of vLLM's operations that the plugin has a kernel for: whose kernel serves, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .. import gates
from ..ops.compile.built import Built
from ..ops.compile.jit import GPUS
from ..ops.compile.spec import KERNELS
from ..ops.operations import DEFINED, GATE, NO_GPU, OPS, SKIP, choose
from ._host import Tool
from ._kernels import missing


@dataclass(frozen=True, slots=True)
class OperationRow:
    """``serves`` says what a process that is started now would use, as far as it can be known without one.

    It is the plugin's kernel, vLLM's, or the plugin's definition in torch where vLLM has none.
    """

    operation: str
    serves: Literal["plugin", "vllm", "torch"]
    reason: str


def operation_rows(
    kind: str,
    settings: gates.Settings,
    tools: Sequence[Tool],
    libraries: Sequence[Built],
    *,
    extension: bool,
) -> tuple[OperationRow, ...]:
    """One row for each operation with a kernel; where vLLM has no kernels, one for each that the plugin defines.

    vLLM's own schema is not looked at, for that needs a process that imports it; the journals of processes have what
    was found there.

    Args:
        kind: of the platform: ``cuda``, ``musa`` or ``cpu``.
        settings: of the processes.
        tools: the compilers and build tools of this host.
        libraries: what lies in the wheel and in the cache.
        extension: the installed vLLM has compiled kernels.
    """
    defined = kind == "musa" and not extension
    stock: Literal["torch", "vllm"] = "torch" if defined else "vllm"
    values, trusted = settings.values, not settings.process_errors
    rows = []
    for op in OPS.values():
        if not trusted:
            row = OperationRow(op.qualname, "vllm", "a variable has a bad value")
        elif not settings.switched_on:
            row = OperationRow(op.qualname, "vllm", "VLLM_HWPLUGIN=0")
        elif kind not in GPUS:
            row = OperationRow(op.qualname, "vllm", NO_GPU)
        else:
            choice = choose(op, values[GATE].text, values[SKIP].names, defined=defined)
            reason = choice.reason
            if choice.wanted and not any(item.kernel == op.name for item in libraries):
                other = "its definition in torch serves" if defined else "vLLM's kernel serves"
                reason += f"; not built so far: {missing(KERNELS[op.name], kind, tools)} {other}"
            row = OperationRow(op.qualname, "plugin" if choice.wanted else stock, reason)
        rows.append(row)
    if defined and trusted and settings.switched_on:
        rows += [
            OperationRow(item.qualname, "torch", f"this vLLM has no kernel of it, for {item.caller}")
            for item in DEFINED.values()
            if item.name not in OPS
        ]
    return tuple(rows)


def operation_problems(kind: str, settings: gates.Settings) -> tuple[str, ...]:
    """Operations that the gate demands and that cannot have the plugin's kernel here: a process of vLLM would stop."""
    values = settings.values
    if settings.process_errors or not settings.switched_on or values[GATE].text != "on":
        return ()
    if kind in GPUS or not (names := [name for name in OPS if name not in values[SKIP].names]):
        return ()
    return (f"{GATE}=on, but {NO_GPU}, so vLLM would not start; {SKIP}={','.join(names)} lets it",)
