# SPDX-License-Identifier: Apache-2.0
"""Free KV cache blocks outside a sliding window only by tokens that cannot be rejected.

With asynchronous scheduling vLLM schedules a step while the last one still runs, and ``Request.num_computed_tokens`` is
ahead by that step's drafts until they are verified. vLLM up to 0.25 frees by it. A rejection then moves the window back
over blocks that other requests may have by then.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager

from vllm_hwplugin.base.features import WINDOW_BLOCKS
from vllm_hwplugin.base.run_records import RunRecord
from vllm_hwplugin.spec_decode.engine_report import NO_SPECULATION, UNNEEDED, Findings, Unused, report, use_of


def remove_skipped_blocks(coordinator: Any, request: Any, total_computed_tokens: int, **more: Any) -> None:
    """Free skipped blocks by the tokens that cannot be rejected any more.

    Args:
        request: vLLM's ``Request``. Its ``num_output_placeholders`` are the tokens that scheduled steps may still give,
            one and the drafts of each; 0 in a prefill, which rejects nothing, and without asynchronous scheduling.
        total_computed_tokens: of the request, if every draft is accepted.
    """
    certain = max(0, total_computed_tokens - request.num_output_placeholders)
    for manager in coordinator.single_type_managers:
        # MambaManager subtracts the drafts itself, and would subtract them twice.
        computed = total_computed_tokens if isinstance(manager, MambaManager) else certain
        manager.remove_skipped_blocks(request.request_id, computed, **more)


def report_scheduler(scheduler: Any) -> None:
    """Report whether a scheduler uses this; its patched ``__init__`` calls it last."""
    report(scheduler, _examine)


def _examine(scheduler: Any, entry: RunRecord) -> Findings:
    config = scheduler.vllm_config
    keeps_all = SingleTypeKVCacheManager.get_num_skipped_tokens
    windows = (
        type(manager).get_num_skipped_tokens is not keeps_all and not isinstance(manager, MambaManager)
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    )
    use = use_of(
        (
            NO_SPECULATION._replace(holds=config.speculative_config is None),
            Unused(
                "without asynchronous scheduling a step is scheduled when the last one's drafts are verified",
                not config.scheduler_config.async_scheduling,
                UNNEEDED,
            ),
            Unused("no layer frees blocks behind a window", not any(windows), UNNEEDED),
        )
    )
    return Findings("scheduler", {WINDOW_BLOCKS: use} if WINDOW_BLOCKS in entry.live else {})
