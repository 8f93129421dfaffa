# SPDX-License-Identifier: Apache-2.0
"""Memory in which the large-head kernel leaves the results of its splits: one piece for all layers of a process.

Layers run one after the other, so they can share it. With dual-batch overlap (vLLM's ``--enable-dbo``) two halves of a
batch run at the same time, and each has its own. It is taken while the model is built: vLLM's memory profiling then
counts it, and captured graphs keep its address.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import dbo_current_ubatch_id


def this_device() -> torch.device:
    """The device of this process."""
    device = torch.device(current_platform.device_type)
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def reserve(device: torch.device) -> tuple[Any, ...]:
    """The scratch of a device, one for each batch that runs at a time."""
    config = get_current_vllm_config_or_none()
    count = config.parallel_config.num_ubatches if config is not None and config.parallel_config.use_ubatching else 1
    return tuple(_scratch(device, number) for number in range(count))


def of_this_batch(scratch: tuple[Any, ...]) -> Any:
    """The piece that the calling thread may write to."""
    return scratch[0] if len(scratch) == 1 else scratch[dbo_current_ubatch_id()]


# Held by the layers alone: what an engine took goes with it. In sleep mode it may lie in a pool that is unmapped while
# the engine sleeps, and the next engine of the process must not find it.
_taken: weakref.WeakValueDictionary[tuple[torch.device, int], Any] = weakref.WeakValueDictionary()


def _scratch(device: torch.device, number: int) -> Any:
    found = _taken.get((device, number))
    if found is None:
        from .paged import Scratch

        found = _taken[device, number] = Scratch.allocate(device)
    return found
