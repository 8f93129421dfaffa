# SPDX-License-Identifier: Apache-2.0
"""The answer to vLLM's question for a platform class: decided once a process, logged once, and kept for ``doctor``."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import gates, record
from . import _detect, _rivals
from ._detect import GATE, Decision

logger = logging.getLogger("vllm.hwplugin")

#: Under this key the decision stands among a process's decisions (:func:`vllm_hwplugin.record.note`).
KEY = "platform"

_asking = threading.local()


def offer() -> str | None:
    """The qualified name of the class to offer, or None. vLLM asks twice in each process."""
    if getattr(_asking, "rivals", False):
        # Another plugin asks, while it is being asked, whether this one offers a class. It comes first then.
        return None
    return decision().qualname


@functools.cache
def decision() -> Decision:
    """What is offered in this process, and why. Bad values are an answer here, because vLLM swallows errors."""
    try:
        if not gates.read("VLLM_HWPLUGIN").flag:
            return Decision(None, "VLLM_HWPLUGIN=0")
        choice = gates.read(GATE).text
    except gates.GateError as error:
        found = Decision(None, str(error), logging.ERROR)
    else:
        found = _detect.decide(choice, _detect.ask_vllm(sys.modules.get("vllm.platforms")), _detect.probe_musa)
        if found.kind is not None:
            with _asking_rivals():
                rivals = _rivals.active(_rivals.others(os.environ))
            found = _detect.settle(choice, found, rivals)
    logger.log(found.level, "vllm-hwplugin offers %s", found)
    record.note(KEY, str(found))
    return found


def note_used() -> None:
    """Add to the process's record which class vLLM runs on, if it has chosen one by now.

    vLLM keeps the chosen platform under ``vllm.platforms._current_platform`` in all supported versions; the public name
    would make it choose.
    """
    if record.current() is None:
        return
    used = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    if used is None:
        return
    offered = str(decision()) if decision.cache_info().currsize else "no platform class: vLLM did not ask for one"
    record.note(KEY, f"{offered}; vLLM runs on {type(used).__module__}.{type(used).__qualname__}")


@contextmanager
def _asking_rivals() -> Iterator[None]:
    _asking.rivals = True
    try:
        yield
    finally:
        _asking.rivals = False
