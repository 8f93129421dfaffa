# SPDX-License-Identifier: Apache-2.0
import time

import torch

import torch_musa

from ._utils import _get_musa_device_index


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=f"musa:{_get_musa_device_index(device, optional=True)}", priority=priority)

    @property
    def musa_stream(self):
        return self.native_handle


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, "musa", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def musa_event(self):
        return self.event_id

    def record(self, stream=None):
        super().record() if stream is None else super().record(stream)
        self._at = time.perf_counter()

    def elapsed_time(self, end_event):
        # torch's own takes no subclass; what was launched before is done, for the device is synchronous.
        return (end_event._at - self._at) * 1e3


def _own(stream):
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device=None):
    return _own(torch._C._accelerator_getStream(_get_musa_device_index(device, optional=True)))


def default_stream(device=None):
    now = torch._C._accelerator_getStream(_get_musa_device_index(device, optional=True))
    return Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def set_stream(stream):
    if stream is not None:
        torch._C._accelerator_setStream(stream)


class StreamContext:
    """Makes a stream, and its device, the current one."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self._device = torch._C._accelerator_getDeviceIndex()
            self._before = current_stream(self.stream.device_index)
            # The package's attribute, as torch_musa's: whoever replaces it sees each stream.
            torch_musa.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_):
        if self.stream is not None:
            torch_musa.set_stream(self._before)
            torch._C._accelerator_setDeviceIndex(self._device)
        return False


def stream(stream):
    return StreamContext(stream)
