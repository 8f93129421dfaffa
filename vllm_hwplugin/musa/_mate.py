# SPDX-License-Identifier: Apache-2.0
"""What all attention over mate asks of it. Not run on MUSA hardware."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mate  # type: ignore[import-not-found]  # MUSA hosts only
import torch


def checked(backend: str, name: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """A function of mate's that takes all of these, and requires no more.

    mate changed names of arguments from release to release, and one that is left out would be a wrong answer: a model
    without its sinks, or a mask that is causal.

    Raises:
        ImportError: it does not; names the backend.
        AttributeError: mate has no such function.
    """
    function: Callable[..., Any] = getattr(mate, name)
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        raise ImportError(
            f"mate.{name} cannot be called as {backend} calls it, with {', '.join(arguments)}: {error}. mate 0.2.2 "
            "can; docs/platforms.md says what serves without mate"
        ) from error
    return function


def other_type(backend: str, dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Why a KV cache is not of the queries' type, which mate needs; None where it is."""
    if kv_cache_dtype in (None, "auto") or str(dtype) == f"torch.{kv_cache_dtype}":
        return None
    return f"{backend} on MUSA needs keys of the queries' type {dtype}, and the KV cache is {kv_cache_dtype}"
