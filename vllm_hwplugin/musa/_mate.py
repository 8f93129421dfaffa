# SPDX-License-Identifier: Apache-2.0
"""Checks that all attention over mate shares. Not run on MUSA hardware."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import mate  # type: ignore[import-not-found]  # MUSA hosts only
import torch

from . import versions

#: FP8 types of a KV cache that mate's attention reads: e4m3. Queries then have the same type.
FP8: Final = ("fp8", "fp8_e4m3")


def checked(backend: str, name: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Return mate's function if it takes exactly these arguments, or raise ImportError.

    mate renames arguments between releases, and a dropped argument would be a wrong result: a model without its sinks.
    """
    function: Callable[..., Any] = getattr(mate, name)
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        raise ImportError(
            f"{backend} on MUSA: mate.{name} does not take {', '.join(arguments)}: {error}. Install mate 0.2.2 or "
            "later; docs/platforms.md lists the backends without mate"
        ) from error
    return function


def cache_trouble(backend: str, dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Return why mate cannot read this KV cache, or None."""
    if kv_cache_dtype in (None, "auto") or str(dtype) == f"torch.{kv_cache_dtype}":
        return None
    if kv_cache_dtype not in FP8:
        return f"{backend} on MUSA needs keys of the queries' type {dtype}, and the KV cache is {kv_cache_dtype}"
    mate, least = versions.installed("mate"), versions.MATE_WITH_FP8
    if mate is not None and not versions.older(mate, least):
        return None
    return f"{backend} on MUSA does not support KV cache type {kv_cache_dtype} with mate {mate}; {least} does"
