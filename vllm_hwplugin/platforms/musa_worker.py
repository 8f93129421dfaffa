# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker on a Moore Threads GPU. Not run on MUSA hardware."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import Worker

from . import _vllm_api


class MusaWorker(Worker):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """vLLM's own worker; only its test for the device's name is met (see :func:`._vllm_api.taken_for_cuda`)."""

    def init_device(self) -> None:
        with _vllm_api.taken_for_cuda(self.device_config, torch.cuda, torch.musa):
            super().init_device()
