# SPDX-License-Identifier: Apache-2.0
import torch

from ._utils import _get_musa_device_index


def _flat(prefix, value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def empty_cache():
    torch._C._accelerator_emptyCache()


def memory_stats(device=None):
    return dict(sorted(_flat("", torch._C._accelerator_getDeviceStats(_get_musa_device_index(device, optional=True)))))


def memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device=None):
    torch._C._accelerator_resetPeakStats(_get_musa_device_index(device, optional=True))


def mem_get_info(device=None):
    return torch._C._accelerator_getMemoryInfo(_get_musa_device_index(device, optional=True))


def get_allocator_backend():
    return "native"


class MemPool:
    def __init__(self, *_, **__):
        raise NotImplementedError("the simulated allocator has no pools")


def use_mem_pool(pool, device=None):
    raise NotImplementedError("the simulated allocator has no pools")


class MUSAPluggableAllocator:
    def __init__(self, *_, **__):
        raise NotImplementedError("the simulated allocator cannot be replaced")
