# SPDX-License-Identifier: Apache-2.0
"""The answer to vLLM's question for a platform class: decided once a process, logged once, and kept for ``doctor``."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Final

from .. import gates, journal
from ..errors import HwpluginError
from . import _detect
from ._detect import GATE, Decision

logger = logging.getLogger("vllm.hwplugin")

#: Under this key the decision stands among a process's decisions (:func:`vllm_hwplugin.journal.note`).
KEY = "platform"

_asking = threading.local()


class PlatformError(HwpluginError, RuntimeError):
    """Strict mode is on, and no class can be offered through a fault, or the named one cannot."""


def offer() -> str | None:
    """The qualified name of the class to offer, or None. vLLM asks twice in each process."""
    if getattr(_asking, "rivals", False):
        # Another plugin asks, while it is being asked, whether this one offers a class. It comes first then.
        return None
    return decision().qualname


@functools.cache
def decision() -> Decision:
    """What is offered in this process, and why. Faults and bad values are answers, because vLLM swallows errors."""
    fault: Exception | None = None
    try:
        found = _decide()
    except gates.GateError as error:
        found = Decision(None, str(error), logging.ERROR)
    except Exception as error:
        fault = error
        found = Decision(None, f"its choice failed: {type(error).__name__}: {error}", logging.ERROR)
    if found is not _SWITCHED_OFF:
        logger.log(found.level, "vllm-hwplugin offers %s", found, exc_info=fault)
        journal.note(KEY, str(found))
    return found


_SWITCHED_OFF = Decision(None, "VLLM_HWPLUGIN=0")


def _decide() -> Decision:
    if not gates.read("VLLM_HWPLUGIN").flag:
        return _SWITCHED_OFF
    choice = gates.read(GATE).text
    found, rivals = foresee(choice, _detect.ask_vllm(sys.modules.get("vllm.platforms")), os.environ)
    if found.kind is None:
        return found
    with _asking_rivals():
        offering = active(rivals)
    return _detect.settle(choice, found, offering)


def foresee(
    choice: str, builtins: tuple[str, ...] | None, environ: Mapping[str, str]
) -> tuple[Decision, tuple[EntryPoint, ...]]:
    """The choice as far as it can be told without asking other plugins, which would import vLLM.

    Args:
        choice: what the gate `GATE` says.
        builtins: the platforms that vLLM's own detection finds; None where it cannot be asked.
        environ: where the plugins that are to be loaded are named.

    Returns:
        The decision, and the other plugins that a process would ask; none where no class is offered anyway.
    """
    found = _detect.decide(choice, builtins, _detect.probe_musa)
    return found, tuple(others(environ)) if found.kind is not None else ()


def must_hold() -> None:
    """Say in strict mode what vLLM would swallow if :func:`offer` raised it.

    Raises:
        PlatformError: this process was asked for a class and could offer none, through a fault or against its gate.
    """
    if not decision.cache_info().currsize or not gates.read(gates.STRICT).flag:
        return
    found = decision()
    if found.kind is None and found.level >= logging.ERROR:
        raise PlatformError(
            f"{gates.STRICT}=1, but vllm-hwplugin offers {found}; set {GATE}=off to run without a class"
        )


def note_used() -> None:
    """Add to the process's journal which class vLLM runs on, if it has chosen one by now.

    vLLM keeps the chosen platform under ``vllm.platforms._current_platform`` in all supported versions; the public name
    would make it choose.
    """
    if journal.current() is None:
        return
    used = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    if used is None:
        return
    offered = str(decision()) if decision.cache_info().currsize else "no platform class: vLLM did not ask for one"
    journal.note(KEY, f"{offered}; vLLM runs on {type(used).__module__}.{type(used).__qualname__}")


@contextmanager
def _asking_rivals() -> Iterator[None]:
    _asking.rivals = True
    try:
        yield
    finally:
        _asking.rivals = False


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
