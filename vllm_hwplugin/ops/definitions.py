# SPDX-License-Identifier: Apache-2.0
"""Define vLLM's operations where a build of vLLM has none of them for the device that it runs on.

On CUDA nothing of this happens: vLLM's C extension has them all. A vLLM for no device, on which MUSA hosts can run, has
no extension, and calls some of its operations by name all the same. What is there already stays.
"""

from __future__ import annotations

import importlib
import logging
import operator
import threading
from typing import Any

from .. import journal
from .definition_table import DEFINITIONS, Definition
from .override_table import RECORD, describe

logger = logging.getLogger("vllm.hwplugin")

_lock = threading.Lock()
# An operation is gone when its library is.
_libraries: dict[str, Any] = {}


def define_missing(key: str, version: str) -> tuple[str, ...]:
    """Define, for one dispatch key, what vLLM's extension does not have. To be called after that was imported.

    Calling it again changes nothing.

    Args:
        key: the dispatch key of the device.
        version: of vLLM, which decides between schemas.

    Returns:
        The operations that have got a definition, now or before.
    """
    with _lock:
        new = [item for item in DEFINITIONS.values() if item.name not in _libraries and _define(item, key, version)]
    if new:
        logger.info(
            "this vLLM has no kernel for %s of %s; the plugin's definitions in torch serve",
            key,
            ", ".join(item.qualname for item in new),
        )
    for item in new:
        journal.note(f"{RECORD}{item.name}", describe("torch", f"this vLLM has no kernel of it for {key}"))
    return tuple(_libraries)


def is_defined(name: str) -> bool:
    """Whether an operation is the plugin's own in this process, so that vLLM has no kernel to go back to."""
    return name in _libraries


def remove() -> None:
    """Take all definitions back. For tests: not while one of them runs."""
    with _lock:
        for library in _libraries.values():
            library._destroy()
        _libraries.clear()


def _define(item: Definition, key: str, version: str) -> bool:
    torch: Any = importlib.import_module("torch")
    there = getattr(getattr(torch.ops, item.namespace), item.name, None)
    if there is not None:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if any(has(item.qualname, one) for one in (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")):
            return False
        known = [_types(torch._C.parse_schema(f"{item.namespace}::{one.text}")) for one in item.schemas]
        if _types(there.default._schema) not in known:
            logger.warning(
                "%s has no kernel for %s and a schema that is not known, so it stays as it is: %s",
                item.qualname,
                key,
                there.default._schema,
            )
            return False
    body = operator.attrgetter(item.body)(importlib.import_module(f"vllm_hwplugin.ops.{item.module}"))
    library = torch.library.Library(item.namespace, "FRAGMENT")
    if there is None:
        library.define(item.schema(version))
    library.impl(item.name, body, key)
    _libraries[item.name] = library
    return True


def _types(schema: Any) -> list[tuple[str, bool]]:
    """What a body can be called with. Builds for other devices name arguments differently."""
    return [(str(argument.type), argument.is_write) for argument in schema.arguments]
