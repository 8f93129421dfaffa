# SPDX-License-Identifier: Apache-2.0
"""The sides of ``bench ops``: the plugin's operation with its kernel, and vLLM's own of the same name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_hwplugin.ops.definitions import is_defined

from . import _op_cases as cases
from ._op_cases import OpCase, Operand
from ._timer import Missing, needed

#: vLLM's libraries define their operations in these namespaces, in every version.
_NAMESPACES = ("_C", "_moe_C")


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


def passed(kernel: str, case: OpCase, values: Sequence[Any]) -> list[Any]:
    """What one side gets of the arguments: the same tensors, but for a table that has been converted beforehand."""
    if kernel != cases.VLLM_FLOAT32:
        return list(values)
    return [
        value.float() if isinstance(one, Operand) and one.name == cases.TABLE else value
        for one, value in zip(case.arguments, values, strict=True)
    ]


def trailing(run: Any, given: int) -> list[None]:
    """What has to be passed after the first ``given`` arguments: later versions of vLLM have more without a default.

    Raises:
        ValueError: one of them cannot be None.
    """
    more = [one for one in run.default._schema.arguments[given:] if not one.has_default_value()]
    if odd := [one.name for one in more if not isinstance(one.type, torch.OptionalType)]:
        raise ValueError(f"this vLLM's {run.default._schema} also needs {', '.join(odd)}")
    return [None] * len(more)
