# SPDX-License-Identifier: Apache-2.0
"""Other platform plugins on this host."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Mapping
from typing import Final

logger = logging.getLogger("vllm.hwplugin")

GROUP: Final = "vllm.platform_plugins"
OWN: Final = "vllm_hwplugin.plugin:platform"


def others(environ: Mapping[str, str]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of the group that vLLM would load beside this plugin's: ``VLLM_PLUGINS`` filters by name."""
    allowed = environ.get("VLLM_PLUGINS")
    names = None if allowed is None else allowed.split(",")
    return tuple(
        point
        for point in importlib.metadata.entry_points(group=GROUP)
        # By value: an editable and an ordinary installation list the same entry point twice.
        if point.value != OWN and (names is None or point.name in names)
    )


def active(points: Iterable[importlib.metadata.EntryPoint]) -> tuple[str, ...]:
    """The names of those whose function offers a platform class on this host.

    This calls the function, as vLLM does as well. One that fails offers nothing: vLLM ignores it.
    """
    return tuple(dict.fromkeys(point.name for point in points if _offers(point)))


def _offers(point: importlib.metadata.EntryPoint) -> bool:
    try:
        return point.load()() is not None
    except Exception:
        logger.debug("the platform plugin %s (%s) failed", point.name, point.value, exc_info=True)
        return False
