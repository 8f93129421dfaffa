# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks of the process that an engine runs in, where the caller is another one.

vLLM mixes the class that its option ``worker_extension_cls`` names into its worker, in every supported version and on
every platform, and ``collective_rpc`` calls the methods by name. Only what `StepKinds` looks at is on the path of a
step, and only of ``bench serve``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ._gpu_busy import samples
from ._inside import package_facts, runner_facts
from ._profile import Profile, profiled
from ._step_kinds import StepKinds

#: For ``worker_extension_cls``.
EXTENSION = f"{__name__}.BenchWorker"


class BenchWorker:
    """Methods of a worker; vLLM allows none that the worker has itself."""

    model_runner: Any

    def hwplugin_facts(self) -> dict[str, Any]:
        """What this process runs, and what the model runner turned out to be.

        Raises:
            WrongRunner: it is not the one that was asked for.
        """
        return {**package_facts(), **runner_facts(self.model_runner)}

    def hwplugin_steps(self) -> list[dict[str, Any]]:
        """The kinds of steps since the last call (see `StepKinds.taken`); of the first, from which they are seen on."""
        if not hasattr(self, "_hwplugin_kinds"):
            self._hwplugin_kinds = StepKinds(self.model_runner)
        return self._hwplugin_kinds.taken()

    def hwplugin_gpu_busy(self, since: float, until: float) -> list[float]:
        """Shares of time in which this worker's GPU ran a kernel, between two of ``time.time``; none if unknown."""
        import torch
        from vllm.third_party import pynvml

        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            return samples(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), since, until)
        except (pynvml.NVMLError, RuntimeError, AssertionError):  # no GPU, or a container that may not ask
            return []

    def hwplugin_start_profile(self) -> None:
        """Profile until :meth:`hwplugin_stop_profile`."""
        stack = ExitStack()
        self._hwplugin_profile: tuple[ExitStack, Profile] = (stack, stack.enter_context(profiled(self.model_runner)))

    def hwplugin_stop_profile(self) -> None:
        """Collect no more."""
        stack, _ = self._hwplugin_profile
        stack.close()

    def hwplugin_profile_counts(self) -> dict[str, Any]:
        """What was launched a step, and how long the GPU worked."""
        _, profile = self._hwplugin_profile
        return profile.counts()
