# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker on a Moore Threads GPU. Not run on MUSA hardware."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from vllm.v1.worker.gpu_worker import Worker

from . import _vllm_api


class MusaWorker(Worker):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """vLLM's own worker, but for two questions that it asks of a device.

    Its test for the device's name is met (see :func:`._vllm_api.taken_for_cuda`), and weights and KV cache come from
    torch's allocator.
    """

    def init_device(self) -> None:
        with _vllm_api.taken_for_cuda(self.device_config, torch.cuda, torch.musa):
            super().init_device()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # From 0.23 on vLLM takes its allocator for sleep mode on every device that it does not know. Nobody asks for
        # it here: MusaPlatform has neither sleep mode nor that allocator, and vLLM refuses both by that.
        return nullcontext()
