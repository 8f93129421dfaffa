# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker on a Moore Threads GPU. Not run on MUSA hardware."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from ..base import gates
from . import _vllm_api, self_test, triton_gaps, versions


class MusaWorker(Worker):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """vLLM's GPU worker with torch's allocator, and the checks of device and Triton replaced."""

    def init_device(self) -> None:
        # Before the model runner creates the sampler.
        if versions.triton_trouble(versions.installed("triton")):
            _vllm_api.sample_without_triton()
        _vllm_api.mask_without_inductor()
        triton_gaps.fix_aliases()
        triton_gaps.give_benchmark()
        with _vllm_api.taken_for_cuda(self.device_config, torch.cuda, torch.musa):
            super().init_device()
        capability = torch.musa.get_device_capability()
        if capability < versions.MIN_CAPABILITY:
            number = ".".join(map(str, capability))
            raise ValueError(f"this GPU has MUSA {number}, expected 3.1 or later: {versions.WIDE_WARPS}")
        if gates.read(self_test.GATE).flag:
            self._test_device()

    def _test_device(self) -> None:
        """Refuse what this GPU is found to compute wrongly."""
        checks: Any = importlib.import_module("vllm_hwplugin.musa.self_test_checks")
        device = torch.device(self.device)
        self_test.note_results(self_test.keep_results(checks.this_host(device), lambda: checks.run(device)))
        if self_test.find_wrong(checks.TOP_K):
            _vllm_api.sample_without_triton()
        checks.check_config(self.vllm_config)

    def load_model(self, *args: Any, **options: Any) -> None:
        _vllm_api.bind_caches_of_one_layer()
        _vllm_api.capture_by_thread(torch.musa)
        _vllm_api.sort_masks_as_numbers()
        _vllm_api.set_streams_by_vllm(torch.cuda, torch.musa)
        # Imported late: it imports most of vLLM.
        importlib.import_module("vllm_hwplugin.musa.layers")
        super().load_model(*args, **options)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # From 0.23 on vLLM uses its allocator for sleep mode on every device that it does not know. MusaPlatform
        # supports neither, so vLLM refuses options that need them.
        return nullcontext()

    def compile_or_warm_up_model(self) -> Any:
        if not _vllm_api.triton_has_knobs():
            _vllm_api.switch_off_jit_monitor()
        return super().compile_or_warm_up_model()
