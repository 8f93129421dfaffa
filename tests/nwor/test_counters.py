# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says of a step becomes counters of draft rows, by engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter

from vllm_hwplugin.nwor.counters import EMIT_METRICS, counters_for

from .configs import config

LABELS, ENGINES = ["model_name", "engine"], {0: ["small", "0"], 1: ["small", "1"]}


def counted(engine: str) -> list[float | None]:
    names = (f"vllm:nwor_{kind}_rows_total" for kind in ("drafted", "accepted", "rejected"))
    return [REGISTRY.get_sample_value(name, {"model_name": "small", "engine": engine}) for name in names]


def test_rows_are_counted_for_the_engine_that_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counter(**given: Any) -> Any:
        made.append(Counter(**given))
        return made[-1]

    monkeypatch.setenv(EMIT_METRICS, "1")
    counters = counters_for(config(), counter, LABELS, ENGINES)
    assert counters is not None
    counters.observe(SimpleNamespace(num_draft_tokens=9, num_accepted_tokens=4), 1)
    counters.observe(SimpleNamespace(num_draft_tokens=3, num_accepted_tokens=3), 1)
    assert (counted("0"), counted("1")) == ([0, 0, 0], [12, 7, 5])
    for one in made:
        REGISTRY.unregister(one)


@pytest.mark.parametrize(("asked", "changed"), [("0", {}), ("1", {"pipeline_parallel_size": 2})])
def test_nothing_is_counted_unasked_or_where_rejected_drafts_stay(
    asked: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMIT_METRICS, asked)
    assert counters_for(config(**changed), Counter, LABELS, ENGINES) is None
