# SPDX-License-Identifier: Apache-2.0
import torch


def _get_musa_device_index(device, optional=False):
    """The index that an int, a string or a ``torch.device`` means; the current device's where it names none."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if device is None or (device.type == "musa" and device.index is None):
        if device is None and not optional:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        return torch._C._accelerator_getDeviceIndex()
    if device.type != "musa":
        raise ValueError(f"Expected a musa device, but got: {device}")
    return device.index
