# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks of the process that an engine runs in, where the caller is another one.

vLLM mixes the class that its option ``worker_extension_cls`` names into its worker, in every supported version and on
every platform, and ``collective_rpc`` calls the methods by name. Nothing here is on the path of a step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vllm_hwplugin import journal
from vllm_hwplugin.spec_decode import step_counts

from ._inside import package_facts, runner_facts
from ._profile import Profile, profiled

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

    def hwplugin_steps(self) -> dict[str, dict[str, int]]:
        """Steps so far of each fast path of the plugin, by outcome; empty where it is off."""
        step_counts.save()
        entry = journal.current()
        return {} if entry is None else {path: dict(outcomes) for path, outcomes in entry.steps.items()}

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
