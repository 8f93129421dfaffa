# SPDX-License-Identifier: Apache-2.0
"""Blocks that rejected drafts bring back into a sliding window are not free; test_called_hunks.py calls the hunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

from vllm_hwplugin.base import run_records
from vllm_hwplugin.frozen import window_blocks


def scheduler_with(*managers: type, speculation: str | None = "eagle3", asynchronous: bool = True) -> Any:
    """What is read of vLLM's scheduler, with managers of vLLM's own classes."""
    config = SimpleNamespace(
        speculative_config=speculation, scheduler_config=SimpleNamespace(async_scheduling=asynchronous)
    )
    coordinator = SimpleNamespace(single_type_managers=[object.__new__(manager) for manager in managers])
    return SimpleNamespace(vllm_config=config, kv_cache_manager=SimpleNamespace(coordinator=coordinator))


def test_blocks_are_freed_by_tokens_that_cannot_be_rejected() -> None:
    """vLLM's Mamba layers subtract drafts themselves."""
    coordinator = scheduler_with(SlidingWindowManager, MambaManager).kv_cache_manager.coordinator
    asked: list[tuple[str, int]] = []
    for manager in coordinator.single_type_managers:
        manager.remove_skipped_blocks = lambda *given: asked.append(given)
    request = SimpleNamespace(request_id="a", num_output_placeholders=8)
    for tokens in (49, 5):
        window_blocks.remove_skipped_blocks(coordinator, request, tokens)
    assert asked == [("a", 41), ("a", 49), ("a", 0), ("a", 5)]


@pytest.mark.parametrize(
    ("scheduler", "used"),
    [
        (scheduler_with(FullAttentionManager, SlidingWindowManager), True),
        (scheduler_with(ChunkedLocalAttentionManager), True),
        (scheduler_with(FullAttentionManager, MambaManager), False),
        (scheduler_with(SlidingWindowManager, speculation=None), False),
        (scheduler_with(SlidingWindowManager, asynchronous=False), False),
    ],
)
def test_the_scheduler_says_whether_drafts_can_move_a_window_back(scheduler: Any, used: bool, tmp_path: Path) -> None:
    run_records.forget()
    entry = run_records.new("1")
    entry.features = {"window-blocks": {"state": "live", "reason": ""}}
    run_records.begin(entry, tmp_path)
    window_blocks.report_scheduler(scheduler)
    use = entry.uses["window-blocks"]
    run_records.forget()
    assert use["used"] is used
    assert bool(use["reason"]) is not used
