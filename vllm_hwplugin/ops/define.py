# SPDX-License-Identifier: Apache-2.0
"""Define operations of ``torch.ops.hwplugin``; the kernels in ``csrc`` register themselves for them when loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from .compile.jit import GPUS, ensure
from .compile.spec import KernelSpec

Reference = TypeVar("Reference", bound=Callable[..., None])

# An operation is gone when what holds its definition is.
_libraries: Final[dict[str, torch.library.Library]] = {}

#: Name -> the schema that it was defined by.
SCHEMAS: dict[str, str] = {}


def operation(kernel: KernelSpec, writes: tuple[str, ...]) -> Callable[[Reference], Reference]:
    """Decorate the torch reference of an operation that writes into tensors of its caller and returns nothing.

    The reference is the operation's one description in Python: its name, arguments, types and defaults become the
    schema, it serves every device that no kernel is loaded for, and its docstring says what callers have to know. The
    decorated function calls the operation, so the kernel serves it if there is one. The first call for a GPU's tensor
    loads the kernel, which may run a compiler.

    ``__wrapped__`` of the result is the reference itself.

    Args:
        kernel: of the operation's name.
        writes: the arguments that are written, by name.
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
    return any(isinstance(one, torch.Tensor) and one.device.type in GPUS for one in arguments)


def _schema(reference: Callable[..., None], writes: tuple[str, ...]) -> str:
    """The arguments as vLLM writes them: sizes that are plain numbers, and written tensors without names."""
    inferred = str(torch.library.infer_schema(reference, mutates_args=writes))
    return re.sub(r"\(\w+!\)", "!", inferred.replace("SymInt", "int"))


def define(schema: str, reference: Callable[..., Any] | None = None, shape: Callable[..., Any] | None = None) -> None:
    """Define an operation by its schema.

    Args:
        schema: as ``torch.library.Library.define`` takes it.
        reference: serves every device that no kernel is loaded for; None where nothing does.
        shape: gives the results for tensors without data; None where the operation has no results.
    """
    name = schema.partition("(")[0]
    library = torch.library.Library("hwplugin", "FRAGMENT")
    library.define(schema)
    if reference is not None:
        library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hwplugin::{name}", shape or _no_shape, lib=library)
    _libraries[name], SCHEMAS[name] = library, schema


def _no_shape(*arguments: Any, **settings: Any) -> None:
    """For tensors without data: no shape comes out of such an operation."""
