"""Engine settings that make two runs comparable, by host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# In one process the plugin can be loaded by hand (no installed entry point is needed) and the profiler sees the engine.
_COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def engine_environment(
    device: str, *, patched: bool, inherited: Mapping[str, str], extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables to set for one engine process; what the user has already set is kept, ``extra`` wins."""
    wanted = dict(_COMMON)
    if device == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
    environment = {k: v for k, v in wanted.items() if k not in inherited}
    environment["VLLM_HWPLUGIN"] = "1" if patched else "0"
    environment.update(extra or {})
    return environment


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
