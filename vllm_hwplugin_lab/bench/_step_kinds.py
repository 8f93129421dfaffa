# SPDX-License-Identifier: Apache-2.0
"""Kinds of a model runner's steps in a server's load, and their times.

It observes vLLM's runners, V1 and V2, so it also works without the plugin. It costs 2 us per step.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_hwplugin.spec_decode.step_counts import SERVED, Reason, StepCounts

#: Kind -> its name in tables. The first three only verify and draft; the third has fewer drafts than possible.
KINDS = {
    "same_requests": "same requests",
    "requests_changed": "changed",
    "fewer_drafts": "fewer drafts",
    "prompt": "with a prompt",
}
#: vLLM's CUDA graph modes of the target.
GRAPHS = ("FULL", "PIECEWISE", "NONE")


class StepKinds:
    """Observe a runner's steps from now on.

    A step has two times. ``host`` is from the start of ``execute_model`` to the end of ``sample_tokens``, with their
    waiting. ``seconds`` also has the time until the next step starts: scheduling, and waiting for the GPU. With
    asynchronous scheduling vLLM then waits for the previous step, so that time counts for the previous step. Time
    without requests does not count.
    """

    def __init__(self, runner: Any) -> None:
        config = runner.vllm_config.speculative_config
        self._width = 1 if config is None else 1 + config.num_speculative_tokens
        self._runs_ahead = bool(runner.vllm_config.scheduler_config.async_scheduling)
        # (kind, graph, outcomes of the plugin's paths) -> steps, seconds, and seconds of the host.
        self._sums: dict[tuple[Any, ...], list[float]] = {}
        self._before: list[float] | None = None
        self._decoded: list[str] = []
        # Of the current step.
        self._kind: str | None = None
        self._graph: str | None = None
        self._paths: list[tuple[StepCounts, Reason | None]] = []
        self._began = self._ended = 0.0
        self._look(runner)

    def taken(self) -> list[dict[str, Any]]:
        """Return the steps since the last call, grouped.

        Returns:
            ``kind`` (of `KINDS`), ``graph`` (of `GRAPHS`), ``paths`` (each path's outcome: ``served``, or the label of
            its reason), the number of ``steps``, and their total ``seconds`` and ``host_seconds``.
        """
        groups, self._sums = self._sums, {}
        return [
            {
                "kind": kind,
                "graph": graph,
                "paths": {f"{path.feature} {path.part}": reason.label if reason else SERVED for path, reason in paths},
                "steps": int(steps),
                "seconds": seconds,
                "host_seconds": host,
            }
            for (kind, graph, paths), (steps, seconds, host) in groups.items()
        ]

    def _look(self, runner: Any) -> None:
        # V1's, or V2's.
        graphs = getattr(runner, "cudagraph_dispatcher", None) or getattr(runner, "cudagraph_manager", None)
        run, sample = runner.execute_model, runner.sample_tokens
        dispatch: Any = getattr(graphs, "dispatch", None)
        served, missed = StepCounts.served, StepCounts.missed

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(time.perf_counter(), scheduled)
            output = run(scheduled, *args, **kwargs)
            self._ended = time.perf_counter()
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            self._ended = time.perf_counter()
            return output

        def noting_mode(*args: Any, **kwargs: Any) -> Any:
            graph = dispatch(*args, **kwargs)
            # A step's first dispatch is the target's. V1 returns a tuple of mode and description, V2 a description.
            self._graph = self._graph or (graph[0] if isinstance(graph, tuple) else graph.cg_mode).name
            return graph

        def noting_served(path: StepCounts) -> None:
            self._paths.append((path, None))
            served(path)

        def noting_missed(path: StepCounts, outcome: object) -> bool:
            is_reason = missed(path, outcome)
            self._paths.append((path, outcome if isinstance(outcome, Reason) else None))
            return is_reason

        # On the instances, which hides the classes' methods; the plugin's paths share one class.
        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
        if graphs is not None:
            graphs.dispatch = noting_mode
        for name, noting in (("served", noting_served), ("missed", noting_missed)):
            setattr(StepCounts, name, noting)

    def _begin(self, now: float, scheduled: Any) -> None:
        """Begin a step, and account for the previous one."""
        if self._kind is not None:
            sums = self._sums.setdefault((self._kind, self._graph or "NONE", tuple(self._paths)), [0, 0.0, 0.0])
            host = self._ended - self._began
            sums[:] = sums[0] + 1, sums[1] + host, sums[2] + host
            (self._before or sums)[1] += now - self._ended
            self._before = sums if self._runs_ahead else None
        self._graph, self._paths, self._began = None, [], now
        requests, drafts = list(scheduled.num_scheduled_tokens), scheduled.scheduled_spec_decode_tokens
        before, self._decoded = self._decoded, requests
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:  # vLLM only reports ended requests
            self._kind = self._before = None
        elif (
            not scheduled.scheduled_new_reqs
            and tokens == self._width * len(requests)
            and (self._width == 1 or len(drafts) == len(requests))
        ):
            self._kind = "same_requests" if requests == before else "requests_changed"
        elif not scheduled.scheduled_new_reqs and tokens == len(requests) + sum(map(len, drafts.values())):
            self._kind = "fewer_drafts"
        else:
            self._kind, self._decoded = "prompt", []
