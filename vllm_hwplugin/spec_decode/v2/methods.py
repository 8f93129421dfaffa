# SPDX-License-Identifier: Apache-2.0
"""Replace a method of one object of vLLM's, which calls the original."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any


def put_before(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace `owner`'s method by `method`, whose first argument is the original."""
    # A second call must change nothing: vLLM initializes a KV cache twice.
    own = getattr(owner, name)
    # Compare with `==`: each access makes another bound-method object.
    if not (isinstance(own, partial) and own.func == method):
        # Keep the original's signature: callers inspect it for what this version takes.
        setattr(owner, name, update_wrapper(partial(method, own), own))
