# SPDX-License-Identifier: Apache-2.0
"""Facts about Moore Threads GPUs, asked of the driver's management library without starting a device.

The calls are those of ``pymtml`` (distribution mthreads-ml-py, read at 2.4.3). Like NVML it knows nothing of
``MUSA_VISIBLE_DEVICES``: an index is the physical one, and mapping is the caller's business. Not run on MUSA hardware.

The first question of a process starts the library, which stays until the process ends; questions of several threads
wait for each other. Up to 2.2 ``pymtml`` has one handle for all callers: whoever shuts down first takes it from the
others, and a library that was shut down does not start again.
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
    """How many GPUs the driver has."""
    with _library():
        return int(pymtml.mtmlLibraryCountDevice())


def name(index: int) -> str:
    """The marketing name, such as ``MTT S5000``."""
    with _device(index) as device:
        return str(pymtml.mtmlDeviceGetName(device))


def uuid(index: int) -> str:
    with _device(index) as device:
        return str(pymtml.mtmlDeviceGetUUID(device))


def total_memory(index: int) -> int:
    """The memory of the GPU in bytes."""
    with _device(index) as device, pymtml.mtmlMemoryContext(device) as memory:
        return int(pymtml.mtmlMemoryGetTotal(memory))


def pci_bus_id(index: int) -> str:
    """Segment, bus, device and function, as in ``0000:3b:00.0``."""
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
