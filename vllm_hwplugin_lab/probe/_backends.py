# SPDX-License-Identifier: Apache-2.0
"""The backend classes that this host's vLLM would use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from ._refusal import one_line

# A platform may answer with a class of its own for some of them, as this plugin's does for large heads.
_HEAD_SIZES = (128, 320, 512)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Usable:
    """``classes`` by name, and by vLLM's name those that ended with an exception when they were asked."""

    classes: Mapping[str, type[Any]]
    broken: Mapping[str, str]


def usable() -> Usable:
    """The classes that the platform would choose for a decoder's attention, if the backend were named to it.

    By vLLM's name of the backend; a class that the platform puts in a registered one's place, by ``module.Class``.
    """
    found: dict[str, type[Any]] = {}
    broken: dict[str, str] = {}
    for member in AttentionBackendEnum:
        try:
            for path, backend in _answers(member):
                # A platform may also answer with its only backend, whatever was named.
                if backend.get_name() == member.name:
                    found.setdefault(member.name if path == member.get_path() else path, backend)
        except Exception as error:
            # Some of vLLM's classes for one maker's devices look for that device when they are asked on another.
            broken[member.name] = f"{member.name} cannot be asked on this host: {one_line(error)}"
    return Usable(found, broken)


def load(path: str) -> type[Any]:
    """The class of a ``module.Class``."""
    module, _, attribute = path.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def _answers(member: Any) -> Iterator[tuple[str, type[Any]]]:
    for head_size in _HEAD_SIZES:
        for dtype in _DTYPES:
            asked = AttentionSelectorConfig(head_size=head_size, dtype=dtype, kv_cache_dtype="auto", block_size=None)
            try:
                path = current_platform.get_attn_backend_cls(member, asked)
                yield path, load(path)
            except (ImportError, ValueError, NotImplementedError):
                # Not registered, a package is missing, or the platform says no: not a backend of this host.
                continue
            break


def chosen(names: tuple[str, ...]) -> Usable:
    """The classes that names stand for: vLLM's name of a backend, which may be several classes, or ``module.Class``.

    Args:
        names: none for all that the host can use.

    Raises:
        SystemExit: a name is of no backend of this host.
    """
    if not names:
        return usable()
    here = usable() if any("." not in name for name in names) else Usable({}, {})
    found: dict[str, type[Any]] = {}
    for name in names:
        if "." in name:
            found[name] = load(name)
            continue
        meant = {key: one for key, one in here.classes.items() if name in (key, one.get_name())}
        if not meant:
            why = here.broken.get(name, f"expected {', '.join(here.classes) or 'none'}, or module.Class")
            raise SystemExit(f"no backend {name!r} on this host: {why}")
        found.update(meant)
    return Usable(found, {})
