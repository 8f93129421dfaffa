# SPDX-License-Identifier: Apache-2.0
"""``doctor``'s table of vLLM's operations that the plugin has a kernel for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..base import gates
from ..ops.compile.built import Built
from ..ops.compile.jit import GPUS
from ..ops.compile.spec import KERNELS
from ..ops.operations import DEFINED, GATE, NO_GPU, OPS, SKIP, choose
from ._host import Platform, Tool
from ._kernels import missing


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation, and what a process started now would run for it.

    Attributes:
        serves: The plugin's kernel, vLLM's, or, if vLLM has none, the plugin's definition in torch. A forecast: it is
            made without a process of vLLM.
    """

    operation: str
    serves: Literal["plugin", "vllm", "torch"]
    reason: str


def operation_rows(
    platform: Platform, settings: gates.Settings, tools: Sequence[Tool], libraries: Sequence[Built], *, extension: bool
) -> tuple[OperationRow, ...]:
    """Return a row for each operation with a kernel or a definition.

    Definitions count only if vLLM has no kernels. vLLM's schema is not compared, which would need a process that
    imports vLLM; run records have that result.

    Args:
        libraries: Built kernels in the wheel and in the cache.
        extension: Whether the installed vLLM has compiled kernels.
    """
    defined = platform.kind == "musa" and not extension
    fallback: Literal["torch", "vllm"] = "torch" if defined else "vllm"
    values, trusted = settings.values, not settings.process_errors
    rows = []
    for op in OPS.values():
        if GATE in settings.errors or not trusted:
            row = OperationRow(op.qualname, "vllm", "an environment variable has an invalid value")
        elif not settings.switched_on:
            row = OperationRow(op.qualname, "vllm", "VLLM_HWPLUGIN=0")
        elif platform.kind not in GPUS:
            row = OperationRow(op.qualname, "vllm", NO_GPU)
        else:
            choice = choose(op, values[GATE].text, values[SKIP].names, defined=defined)
            reason = choice.reason
            if choice.wanted and not any(library.kernel == op.name for library in libraries):
                other = "its definition in torch runs" if defined else "vLLM's kernel runs"
                reason += f"; not built: {missing(KERNELS[op.name], platform, tools)} {other}"
            row = OperationRow(op.qualname, "plugin" if choice.wanted else fallback, reason)
        rows.append(row)
    if defined and trusted and settings.switched_on:
        rows += [
            OperationRow(op.qualname, "torch", f"this vLLM has no kernel for it; {op.caller} calls it")
            for op in DEFINED.values()
            if op.name not in OPS
        ]
    return tuple(rows)


def operation_problems(kind: str, settings: gates.Settings) -> tuple[str, ...]:
    """Return a problem if the switch demands kernels that cannot run here."""
    values = settings.values
    if settings.process_errors or not settings.switched_on or values[GATE].text != "on":
        return ()
    if kind in GPUS or not (names := [name for name in OPS if name not in values[SKIP].names]):
        return ()
    return (f"{GATE}=on, but {NO_GPU}: vLLM would not start; set {SKIP}={','.join(names)}, or {GATE}=auto",)
