# SPDX-License-Identifier: Apache-2.0
"""Add the steps that fast paths served to vLLM's own metrics.

A worker counts them, and another process answers for `/metrics`. The messages between them have no room for counts:
vLLM imports their classes before any plugin, and a field cannot be added then. So a thread here reads the workers' run
records, which are never older than a few seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.spec_decode.step_counts import INTERVAL

# For the engines that were made last in this process: vLLM also drops its own counters of earlier engines.
_stop = threading.Event()


class StepCounters:
    """The counter ``vllm:hwplugin_steps``, prometheus_client's or Ray's, by engine, feature, part and outcome."""

    def __init__(
        self, counter_class: Any, labelnames: Sequence[str], per_engine_labelvalues: Mapping[int, Sequence[object]]
    ):
        self._labelvalues = per_engine_labelvalues
        self._counter = counter_class(
            name="vllm:hwplugin_steps",
            documentation="Steps by fast path of vllm-hwplugin: served, or why vLLM's own way was taken.",
            labelnames=[*labelnames, "feature", "part", "outcome"],
        )
        self._workers: dict[int, tuple[str, int]] | None = None
        self._seen: dict[tuple[int, str, str], int] = {}

    def observe(self) -> None:
        """Count what workers have recorded since the last call."""
        if self._workers is None:
            # The engines are ready when a front end makes its metrics, so every worker has its run record.
            family = run_records.families(run_records.read_all()).get((run_records.pids(), os.getpid()), [])
            engines = self._labelvalues
            self._workers = {engine: entry.process for entry in family for engine in engines if entry.engine == engine}
        for engine, worker in self._workers.items():
            entry = run_records.read_latest(worker)
            if entry is not None:
                self._count(engine, entry.steps)

    def _count(self, engine: int, steps: Mapping[str, Mapping[str, int]]) -> None:
        for path, outcomes in steps.items():
            feature, _, part = path.partition(" ")
            for outcome, count in outcomes.items():
                before = self._seen.get((engine, path, outcome), 0)
                self._seen[engine, path, outcome] = count
                # A worker that captures again begins at 0.
                new = count - before if count >= before else count
                self._counter.labels(*self._labelvalues[engine], feature, part, outcome).inc(new)


def follow(
    config: Any, counter_class: Any, labelnames: Sequence[str], per_engine_labelvalues: Mapping[int, Sequence[object]]
) -> None:
    """Start counting the steps of the engines of `config`.

    The patched `PrometheusStatLogger` calls this. Only the first of several API servers counts; they answer `/metrics`
    with the sum of all.
    """
    global _stop
    _stop.set()
    plain = gates.is_on(gates.PLAIN_DECODE) and getattr(config, "use_v2_model_runner", False)
    counted = config.speculative_config is not None or plain
    if not counted or config.parallel_config._api_process_rank > 0:
        return
    _stop = threading.Event()
    counters = StepCounters(counter_class, labelnames, per_engine_labelvalues)
    threading.Thread(target=_follow, args=(counters, _stop), name="vllm-hwplugin metrics", daemon=True).start()


def _follow(counters: StepCounters, stop: threading.Event) -> None:
    while not stop.wait(INTERVAL):
        counters.observe()
