# SPDX-License-Identifier: Apache-2.0
"""A benchmark's methods in an engine's worker process, for a caller in another process.

vLLM mixes the class of its option ``worker_extension_cls`` into its worker, in every supported version and on every
platform, and ``collective_rpc`` calls the methods by name. Only `StepKinds` adds work to a step, and only in ``bench
serve``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ._gpu_samples import samples
from ._inside import package_facts, runner_facts
from ._profile import Profile, profiled
from ._step_kinds import StepKinds

#: The value of ``worker_extension_cls``.
EXTENSION = f"{__name__}.BenchWorker"


class BenchWorker:
    """Methods of a worker; vLLM refuses names that the worker already has."""

    model_runner: Any

    def hwplugin_facts(self) -> dict[str, Any]:
        """Return this process's versions and :func:`runner_facts`, which may raise WrongRunner."""
        return {**package_facts(), **runner_facts(self.model_runner)}

    def hwplugin_steps(self) -> list[dict[str, Any]]:
        """Return the kinds of steps since the last call.

        See `StepKinds.taken`; the first call begins the count.
        """
        if not hasattr(self, "_hwplugin_kinds"):
            self._hwplugin_kinds = StepKinds(self.model_runner)
        return self._hwplugin_kinds.taken()

    def hwplugin_gpu_samples(self, name: str, since: float, until: float) -> list[float]:
        """Return :func:`samples` of this worker's GPU; empty: not known."""
        import torch
        from vllm.third_party import pynvml

        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            return samples(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), name, since, until)
        except (pynvml.NVMLError, RuntimeError, AssertionError):  # no GPU, or no permission in a container
            return []

    def hwplugin_start_profile(self) -> None:
        """Profile until :meth:`hwplugin_stop_profile`."""
        stack = ExitStack()
        self._hwplugin_profile: tuple[ExitStack, Profile] = (stack, stack.enter_context(profiled(self.model_runner)))

    def hwplugin_stop_profile(self) -> None:
        """Stop profiling."""
        stack, _ = self._hwplugin_profile
        stack.close()

    def hwplugin_profile_counts(self) -> dict[str, Any]:
        """Return launches per step, and GPU time."""
        _, profile = self._hwplugin_profile
        return profile.counts()
