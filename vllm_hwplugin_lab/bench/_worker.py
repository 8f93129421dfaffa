# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks of the process that an engine runs in, where the caller is another one.

vLLM mixes the class that its option ``worker_extension_cls`` names into its worker, in every supported version and on
every platform, and ``collective_rpc`` calls the methods by name. Nothing here is on the path of a step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ._graphs import GraphCounts, counted
from ._inside import runner_facts
from ._profile import Profile, profiled

#: For ``worker_extension_cls``.
EXTENSION = f"{__name__}.BenchWorker"


class BenchWorker:
    """Methods of a worker; vLLM allows none that the worker has itself."""

    model_runner: Any

    def hwplugin_facts(self) -> dict[str, Any]:
        """What the model runner turned out to be.

        Raises:
            WrongRunner: it is not the one that was asked for.
        """
        return runner_facts(self.model_runner)

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

    def hwplugin_start_counting(self) -> None:
        """Count CUDA graphs until :meth:`hwplugin_stop_counting`."""
        stack = ExitStack()
        self._hwplugin_counts: tuple[ExitStack, GraphCounts] = (stack, stack.enter_context(counted(self.model_runner)))

    def hwplugin_stop_counting(self) -> list[dict[str, Any]]:
        """The rows of :meth:`GraphCounts.rows`."""
        stack, counts = self._hwplugin_counts
        stack.close()
        return counts.rows()
