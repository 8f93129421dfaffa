# SPDX-License-Identifier: Apache-2.0
"""Engine settings that make two runs comparable, by host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# In one process the profiler sees the engine. The runner is pinned because vLLM's choice depends on version and model.
_COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def engine_environment(
    device: str, *, patched: bool, extra: Mapping[str, str] | None = None, v2_runner: bool = False
) -> dict[str, str]:
    """The variables to set for one engine process, above the user's own; ``extra`` wins over both.

    Stock is the master gate switched off, so all sides run the same installation.
    """
    environment = {**_COMMON, "VLLM_HWPLUGIN": "1" if patched else "0", _RUNNER: "1" if v2_runner else "0"}
    if device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return {**environment, **(extra or {})}


def engine_options(device: str, *, max_model_len: int, cudagraph_mode: str, max_num_seqs: int) -> dict[str, Any]:
    """``LLM`` arguments without the model and the drafter.

    CPU: float32, because bfloat16 has near-ties whose argmax flips with the batch's shape, and eager. GPU: graphs.
    """
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if device == "cpu":
        return {**options, "dtype": "float32", "enforce_eager": True}
    return {**options, "dtype": "bfloat16", "compilation_config": {"cudagraph_mode": cudagraph_mode}}
