# SPDX-License-Identifier: Apache-2.0
"""The engine that the tests here start: small enough that batches fill up, mix prefill and decode, and end unevenly."""

from typing import Any

SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 13,
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    # A fixed amount: profiling the memory would be disturbed by another engine that runs at the same time.
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.25,
    "dtype": "bfloat16",
    "seed": 0,
}
