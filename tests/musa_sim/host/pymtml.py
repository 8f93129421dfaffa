# SPDX-License-Identifier: Apache-2.0
"""The driver's management library over the simulated GPUs: the names of mthreads-ml-py 2.4.3 that vLLM's platforms use.

As there, the library counts who has started it, and every other call needs it started; an index is the physical one,
whatever ``MUSA_VISIBLE_DEVICES`` says.
"""

import contextlib
import os
import types

_MEMORY = "MUSA_SIM_MEMORY"
_started = 0


class MTMLError(Exception):
    pass


def _check():
    if not _started:
        raise MTMLError("Uninitialized")


def mtmlLibraryInit():
    global _started
    _started += 1


def mtmlLibraryShutDown():
    global _started
    _check()
    _started -= 1


def mtmlLibraryCountDevice():
    _check()
    return int(os.environ.get("MUSA_SIM_DEVICES", "1"))


def mtmlLibraryInitDeviceByIndex(index):
    if not 0 <= index < mtmlLibraryCountDevice():
        raise MTMLError("Not Found")
    return types.SimpleNamespace(index=index)


def nvmlSystemGetDriverVersion():
    _check()
    return "5.2.0"


def mtmlDeviceGetName(device):
    _check()
    return "MTT S5000"


def mtmlDeviceGetUUID(device):
    _check()
    return f"00000000-0000-0000-0000-{device.index:012d}"


def mtmlDeviceGetPciInfo(device):
    _check()
    return types.SimpleNamespace(sbdf=f"0000:{device.index + 1:02x}:00.0".encode())


@contextlib.contextmanager
def mtmlMemoryContext(device):
    _check()
    yield device


def mtmlMemoryGetTotal(memory):
    _check()
    return int(os.environ.get(_MEMORY, 4 << 30))
