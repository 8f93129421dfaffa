# SPDX-License-Identifier: Apache-2.0
"""Free the KV cache blocks outside a sliding window by the tokens that are certain to be computed.

With asynchronous scheduling a step is scheduled while the last one still runs, and ``Request.num_computed_tokens`` is
ahead by that step's drafts until they are verified. vLLM up to 0.25 frees by it, and a rejection then moves the window
back over blocks that others may have been given.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager


def remove_skipped_blocks(coordinator: Any, request: Any, total_computed_tokens: int, **more: Any) -> None:
    """What vLLM's ``KVCacheCoordinator.remove_skipped_blocks`` does, but for tokens that may yet be rejected.

    Args:
        coordinator: vLLM's ``KVCacheCoordinator``.
        request: vLLM's ``Request``. Its ``num_output_placeholders`` are the tokens that scheduled steps may still give,
            one and the drafts of each; 0 in a prefill, which rejects nothing, and without asynchronous scheduling.
        total_computed_tokens: of the request, if every draft is accepted.
        more: other arguments, as of vLLM's.
    """
    certain = max(0, total_computed_tokens - request.num_output_placeholders)
    for manager in coordinator.single_type_managers:
        # Mamba's counts the drafts out by itself, and would count them twice.
        computed = total_computed_tokens if isinstance(manager, MambaManager) else certain
        manager.remove_skipped_blocks(request.request_id, computed, **more)
