# SPDX-License-Identifier: Apache-2.0
"""Facts about Moore Threads GPUs from the driver's management library, without starting a device.

It uses ``pymtml`` (distribution mthreads-ml-py, read at 2.4.3). The library ignores ``MUSA_VISIBLE_DEVICES``: indexes
are physical. The first call in a process starts it for the rest of the process, because up to 2.2 the first caller that
shuts down closes it for all. Not run on MUSA hardware.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymtml

_lock = threading.RLock()
_started = False


def count() -> int:
    with _library():
        return int(pymtml.mtmlLibraryCountDevice())


def name(index: int) -> str:
    with _device(index) as device:
        return str(pymtml.mtmlDeviceGetName(device))


def uuid(index: int) -> str:
    with _device(index) as device:
        return str(pymtml.mtmlDeviceGetUUID(device))


def total_memory(index: int) -> int:
    """Return the GPU's memory in bytes."""
    with _device(index) as device, pymtml.mtmlMemoryContext(device) as memory:
        return int(pymtml.mtmlMemoryGetTotal(memory))


def driver() -> str:
    """Return the driver's version; empty: this pymtml does not tell."""
    ask = getattr(pymtml, "nvmlSystemGetDriverVersion", None)
    with _library():
        try:
            return "" if ask is None else str(ask())
        except pymtml.MTMLError:
            return ""


def pci_bus_id(index: int) -> str:
    """Return segment, bus, device and function, such as ``0000:3b:00.0``."""
    with _device(index) as device:
        identifier = pymtml.mtmlDeviceGetPciInfo(device).sbdf
        return identifier.decode() if isinstance(identifier, bytes) else str(identifier)


@contextmanager
def _library() -> Iterator[None]:
    global _started
    with _lock:
        if not _started:
            pymtml.mtmlLibraryInit()
            _started = True
        yield


@contextmanager
def _device(index: int) -> Iterator[Any]:
    with _library():
        yield pymtml.mtmlLibraryInitDeviceByIndex(index)
