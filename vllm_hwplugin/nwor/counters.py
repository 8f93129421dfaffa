# SPDX-License-Identifier: Apache-2.0
"""Prometheus counters of draft rows, from what the scheduler knows: no number is read from the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.features import NWOR
from vllm_hwplugin.nwor import obstacles

logger = logging.getLogger("vllm.hwplugin")

EMIT_METRICS: Final = "VLLM_HWPLUGIN_NWOR_EMIT_METRICS"

_COUNTERS: Final = {
    "drafted": "Draft tokens whose keys and values were written to be verified.",
    "accepted": "Draft tokens whose keys and values stayed in the KV cache.",
    "rejected": "Draft tokens whose keys and values were taken out of the KV cache.",
}


class RowCounters:
    """The counters ``vllm:nwor_{drafted,accepted,rejected}_rows`` of each engine that reports to this process.

    `counter_class` is from prometheus_client or Ray; the labels' values are by engine index.
    """

    def __init__(
        self, counter_class: Any, labelnames: Sequence[str], per_engine_labelvalues: Mapping[int, Sequence[object]]
    ):
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in _COUNTERS.items():
            counter = counter_class(
                name=f"vllm:nwor_{name}_rows", documentation=documentation, labelnames=list(labelnames)
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, stats: Any, engine_idx: int) -> None:
        """Count a step's `SpecDecodingStats`."""
        counts = {
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
            "rejected": stats.num_draft_tokens - stats.num_accepted_tokens,
        }
        for name, count in counts.items():
            self._counters[name][engine_idx].inc(count)


def counters_for(
    config: Any, counter_class: Any, labelnames: Sequence[str], per_engine_labelvalues: Mapping[int, Sequence[object]]
) -> RowCounters | None:
    """Return counters for engines of `config`, or None if it needs none.

    What only the engine's process can find, such as the layout of its KV cache, is not known here.
    """
    if not gates.read(EMIT_METRICS).flag:
        return None
    if (reason := obstacles.of_config(config, obstacles.vllm_version())) is not None:
        logger.warning("%s: no counters, because rejected drafts stay in the KV cache: %s", NWOR, reason)
        return None
    return RowCounters(counter_class, labelnames, per_engine_labelvalues)
