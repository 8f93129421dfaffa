# SPDX-License-Identifier: Apache-2.0
"""Define an operation of ``torch.ops.hwplugin``; the kernels in ``csrc`` register themselves for it when loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(schema: str, reference: Callable[..., None] | None = None) -> torch.library.Library:
    """Define an operation that writes into tensors of its caller and returns nothing.

    Args:
        schema: as ``torch.library.Library.define`` takes it.
        reference: serves every device that no kernel is loaded for; None where nothing does.

    Returns:
        What holds the definition: the operation is gone when it is.
    """
    library = torch.library.Library("hwplugin", "FRAGMENT")
    library.define(schema)
    name = schema.partition("(")[0]
    if reference is not None:
        library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hwplugin::{name}", _no_shape, lib=library)
    return library


def _no_shape(*arguments: Any, **settings: Any) -> None:
    """For tensors without data: no shape comes out of such an operation."""
