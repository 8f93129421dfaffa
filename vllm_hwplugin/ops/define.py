# SPDX-License-Identifier: Apache-2.0
"""Definition of operations in ``torch.ops.hwplugin``. The kernels in ``csrc`` register for them when loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from .compile.jit import GPUS, ensure
from .compile.spec import KernelSpec

Reference = TypeVar("Reference", bound=Callable[..., None])

# An operation lives as long as its library object.
_libraries: Final[dict[str, torch.library.Library]] = {}

#: Operation name -> schema.
SCHEMAS: dict[str, str] = {}


def operation(kernel: KernelSpec, writes: tuple[str, ...]) -> Callable[[Reference], Reference]:
    """Decorate the torch reference of an operation that returns nothing.

    The reference is the operation's only description in Python: its signature becomes the schema, it runs on every
    device without a loaded kernel, and its docstring tells what tensors the kernel takes. A kernel checks its arguments
    in C++; a reference computes what torch can. The decorated function calls the operation, so a loaded kernel runs.
    The first call with a GPU's tensor loads the kernel, which may compile it. ``__wrapped__`` is the reference.
    `writes` names its written arguments.
    """

    def make(reference: Reference) -> Reference:
        define(kernel.name + _schema(reference, writes), reference)
        call: Any = getattr(torch.ops.hwplugin, kernel.name)

        @functools.wraps(reference)
        def operate(*arguments: Any, **named: Any) -> None:
            if not torch.compiler.is_compiling() and _on_gpu(*arguments, *named.values()):
                ensure(kernel)
            call(*arguments, **named)

        return operate  # type: ignore[return-value]

    return make


def _on_gpu(*arguments: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type in GPUS for value in arguments)


def _schema(reference: Callable[..., None], writes: tuple[str, ...]) -> str:
    """Return the arguments as vLLM writes schemas."""
    # vLLM has sizes of type int, and written tensors without names.
    inferred = str(torch.library.infer_schema(reference, mutates_args=writes))
    return re.sub(r"\(\w+!\)", "!", inferred.replace("SymInt", "int"))


def define(schema: str, reference: Callable[..., Any] | None = None, shape: Callable[..., Any] | None = None) -> None:
    """Define an operation by its schema.

    Args:
        reference: runs on every device without a loaded kernel; None for no such fallback.
        shape: returns results for meta tensors; None if the operation has no results.
    """
    name = schema.partition("(")[0]
    library = torch.library.Library("hwplugin", "FRAGMENT")
    library.define(schema)
    if reference is not None:
        library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hwplugin::{name}", shape or _no_shape, lib=library)
    _libraries[name], SCHEMAS[name] = library, schema


def _no_shape(*arguments: Any, **settings: Any) -> None:
    """Return no results for meta tensors."""
