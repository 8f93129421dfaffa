# SPDX-License-Identifier: Apache-2.0
import functools
from typing import NamedTuple

import torch

from .._MUSAC import device as _sim
from ._utils import _get_musa_device_index

# What every simulated GPU is.
NAME, CAPABILITY, MULTI_PROCESSORS = "MTT S5000", (3, 1), 56


class _MusaDeviceProperties(NamedTuple):
    name: str
    major: int
    minor: int
    is_multi_gpu_board: bool
    is_integrated: bool
    multi_processor_count: int
    total_memory: int

    @property
    def gcnArchName(self):
        raise _PassedOver("a GPU of Moore Threads has no gcnArchName")


class _PassedOver(AttributeError, RuntimeError):
    """What torch_musa's properties lack. Of a device that is not CUDA's, torch's cache of compiled code asks for AMD's
    name, and passes over a RuntimeError; the vendor's torch passes over an AttributeError as well (its torch_patches).
    """


def _exchange_device(device):
    return torch._C._accelerator_exchangeDevice(device)


def _maybe_exchange_device(device):
    return torch._C._accelerator_maybeExchangeDevice(device)


class device:
    def __init__(self, device):
        self.index = _get_musa_device_index(device, optional=True)

    def __enter__(self):
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)
        return False


def set_device(device):
    index = _get_musa_device_index(device)
    if index >= 0:
        torch._C._accelerator_setDeviceIndex(index)


def current_device():
    return torch._C._accelerator_getDeviceIndex()


@functools.lru_cache(maxsize=1)
def device_count():
    return len(_sim.devices())


def is_available():
    return device_count() > 0


def synchronize(device=None):
    _sim.synchronize(_get_musa_device_index(device, optional=True))


def get_device_properties(device):
    index = _get_musa_device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return _MusaDeviceProperties(NAME, *CAPABILITY, False, False, MULTI_PROCESSORS, _sim.total_memory())


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_capability(device=None):
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device, peer_device):
    get_device_properties(device), get_device_properties(peer_device)
    # Users of eight S5000 report so.
    return False
