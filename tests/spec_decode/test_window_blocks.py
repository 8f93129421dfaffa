# SPDX-License-Identifier: Apache-2.0
"""Blocks that rejected drafts bring back into a sliding window are not free.

The functions of vLLM that count a request's tokens and free its blocks are executed as they were released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.frozen import window_blocks

from ..conftest import versions
from ..released import take, text_of

pytestmark = pytest.mark.slow

GATE = "VLLM_HWPLUGIN_WINDOW_BLOCKS"
CORE = "vllm/v1/core/"
TOO_EARLY = SUPPORTED[: SUPPORTED.index("0.26.0")]
WINDOW, BLOCK_SIZE, K, PROMPT, STEPS = 24, 4, 7, 41, 40
NULL = object()


class Engine:
    """One request in asynchronous scheduling: a step is scheduled before all drafts of the last one are rejected.

    Args:
        read: the text of a module of vLLM's, by its path.
    """

    def __init__(self, read: Callable[[str], str]) -> None:
        managers = read(CORE + "single_type_kv_cache_manager.py")
        base = take(
            managers,
            "SingleTypeKVCacheManager",
            {"remove_skipped_blocks", "_remove_blocks_in_range", "get_num_skipped_tokens"},
            given={"ABC": object},
        )
        window = take(
            managers, "SlidingWindowManager", {"get_num_skipped_tokens"}, given={"SingleTypeKVCacheManager": base}
        )()
        window.block_size, window.sliding_window, window._null_block = BLOCK_SIZE, WINDOW, NULL
        window.extra_retained_tokens = 0
        window.req_to_blocks, window.block_pool = {"request": []}, SimpleNamespace(free_blocks=lambda blocks, **_: None)
        self.blocks = window.req_to_blocks["request"]

        coordinator = take(
            read(CORE + "kv_cache_coordinator.py"),
            "KVCacheCoordinator",
            {"remove_skipped_blocks"},
            given={"ABC": object},
        )()
        coordinator.single_type_managers = (window,)
        coordinator.get_num_blocks_to_allocate = lambda **_: 0
        coordinator.allocate_new_blocks, coordinator.cache_blocks = self._grow, lambda *_: None
        manager = take(
            read(CORE + "kv_cache_manager.py"),
            "KVCacheManager",
            {"allocate_slots", "remove_skipped_blocks"},
            given={"window_blocks": window_blocks, "RequestStatus": SimpleNamespace(WAITING=1, PREEMPTED=2)},
        )()
        manager.coordinator, manager.max_model_len, manager.enable_caching = coordinator, 4096, False
        manager.empty_kv_cache_blocks = SimpleNamespace(blocks=())
        manager.block_pool = SimpleNamespace(get_num_free_blocks=lambda: 1000)
        manager.create_kv_cache_blocks = lambda blocks: blocks
        self.manager = manager

        plain = take(
            read(CORE + "sched/scheduler.py"),
            "Scheduler",
            {"_connector_finished"},
            given={"SchedulerInterface": _Counts, "SupportsHMA": object, "window_blocks": window_blocks},
        )
        scheduler = take(
            read(CORE + "sched/async_scheduler.py"),
            "AsyncScheduler",
            {"_update_after_schedule"},
            given={"Scheduler": plain},
        )()
        scheduler.num_spec_tokens, scheduler._spec_token_placeholders = K, [-1] * K
        scheduler.num_sampled_tokens_per_step, scheduler.use_v2_model_runner = 1, False
        self.request = SimpleNamespace(
            request_id="request",
            num_tokens=PROMPT,
            num_prompt_tokens=PROMPT,
            num_computed_tokens=0,
            num_output_placeholders=0,
            num_in_flight_tokens=0,
            is_prefill_chunk=False,
            use_structured_output=False,
            status=0,
        )
        scheduler.requests = {"request": self.request}
        manager.get_block_ids = manager.get_block_ids_for_computed_tokens = lambda *_, **__: None
        scheduler.kv_cache_manager, scheduler.vllm_config = manager, SimpleNamespace(kv_transfer_config=None)
        scheduler.connector = SimpleNamespace(request_finished_all_groups=lambda *_: (False, None))
        self.scheduler = scheduler

    def _grow(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> list[Any]:
        while len(self.blocks) * BLOCK_SIZE < num_tokens:
            self.blocks.append(SimpleNamespace(block_hash=None))
        return []

    def _schedule(self, drafts: int, tokens: int) -> None:
        self.manager.allocate_slots(self.request, tokens, num_lookahead_tokens=K)
        self.scheduler._update_after_schedule(
            SimpleNamespace(
                num_scheduled_tokens={"request": tokens},
                scheduled_spec_decode_tokens={"request": [-1] * drafts},
                num_spec_tokens_to_schedule=K,
                pending_structured_output_tokens=False,
                has_structured_output_requests=False,
            )
        )

    def _reject(self, drafts: int, tokens: int) -> None:
        """As `Scheduler.update_from_output` and `AsyncScheduler._update_request_with_output` count."""
        self.request.num_computed_tokens -= drafts
        self.request.num_output_placeholders -= drafts + 1
        self.request.num_in_flight_tokens -= tokens

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """The position of each step's first query, and the blocks that are not free when it runs."""
        self._schedule(0, PROMPT)
        last = (0, PROMPT)
        for position in range(PROMPT, PROMPT + STEPS):
            self._schedule(K, 1 + K)
            self._reject(*last)
            last = (K, 1 + K)
            yield position, self.kept()

    def kept(self) -> list[int]:
        return [i for i, block in enumerate(self.blocks) if block is not NULL]

    def hand_over(self) -> None:
        """As for a request that ends while a step of it is in flight."""
        self.scheduler._connector_finished(self.request)


class _Counts:
    """What `Scheduler._update_after_schedule` counts."""

    requests: dict[str, Any]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += tokens
            self.requests[name].num_in_flight_tokens += tokens


@pytest.fixture
def engine(vllm_tree: Callable[[str], Any]) -> Callable[..., Engine]:
    return lambda version, **choices: Engine(lambda path: text_of(vllm_tree(version), path, **choices))


def first_seen(position: int) -> int:
    return max(0, position - WINDOW + 1) // BLOCK_SIZE


@pytest.mark.parametrize("version", versions(CORE))
def test_a_window_keeps_what_rejected_drafts_bring_back(version: str, engine: Callable[..., Engine]) -> None:
    for position, kept in engine(version).steps():
        assert kept[0] <= first_seen(position), f"the query at {position} reads blocks that are free"
        # Of the step before, one token at least is certain by then, so no more than its block is kept in vain. From
        # 0.26 on that is not said of the prompt.
        assert position == PROMPT or kept[0] >= first_seen(position - 1)
        assert kept == list(range(kept[0], kept[-1] + 1))


@pytest.mark.parametrize("version", versions(CORE))
def test_a_connector_is_given_the_whole_window(version: str, engine: Callable[..., Engine]) -> None:
    one = engine(version)
    for position, _ in one.steps():
        one.hand_over()
        assert one.kept()[0] <= first_seen(position)


@pytest.mark.parametrize("version", versions(CORE, among=TOO_EARLY))
def test_stock_frees_them(version: str, engine: Callable[..., Engine]) -> None:
    free = [position for position, kept in engine(version, **{GATE: "off"}).steps() if kept[0] > first_seen(position)]
    assert len(free) > STEPS // 2


# -- does an engine use it? -------------------------------------------------------------------------------------------


def scheduler_with(
    *managers: type, speculation: object | None = "eagle3", async_scheduling: bool = True
) -> SimpleNamespace:
    """What is read of vLLM's scheduler, with managers of vLLM's own classes."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=speculation, scheduler_config=SimpleNamespace(async_scheduling=async_scheduling)
        ),
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=tuple(object.__new__(manager) for manager in managers))
        ),
    )


@pytest.mark.parametrize(
    ("scheduler", "used"),
    [
        (scheduler_with(FullAttentionManager, SlidingWindowManager), True),
        (scheduler_with(ChunkedLocalAttentionManager), True),
        (scheduler_with(FullAttentionManager, MambaManager), False),
        (scheduler_with(SlidingWindowManager, speculation=None), False),
        (scheduler_with(SlidingWindowManager, async_scheduling=False), False),
    ],
)
def test_the_scheduler_says_whether_drafts_can_move_a_window_back(
    scheduler: SimpleNamespace, used: bool, tmp_path: Path
) -> None:
    run_records.forget()
    entry = run_records.new("1")
    entry.features = {"window-blocks": {"state": "live", "reason": ""}}
    run_records.begin(entry, tmp_path)
    window_blocks.report_scheduler(scheduler)
    use = entry.uses["window-blocks"]
    run_records.forget()
    assert use["used"] is used
    assert bool(use["reason"]) is not used
