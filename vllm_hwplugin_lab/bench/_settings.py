# SPDX-License-Identifier: Apache-2.0
"""Engine settings for comparable runs, by host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_hwplugin.base import gates
from vllm_hwplugin.patching import load_catalogue

_COMMON = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Pinned, because vLLM's choice of the runner depends on version and model.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def stock_environment(device: str) -> dict[str, str]:
    """Return the plugin's variables for an unpatched engine.

    ``VLLM_HWPLUGIN`` is 0, so all sides run the same installation. On ``musa`` vLLM has no platform without the
    plugin's class: there every feature is off (patches, operations, attention), and only the class stays.
    """
    if device == "musa":
        off = {gate.name: "off" for gate in (*gates.GATES, *load_catalogue().gates) if gate.switches}
        return {"VLLM_HWPLUGIN": "1", "VLLM_HWPLUGIN_PATCHES": "", **off}
    return {"VLLM_HWPLUGIN": "0"}


def engine_environment(
    device: str,
    *,
    patched: bool,
    extra: Mapping[str, str] | None = None,
    v2_runner: bool = False,
    own_process: bool = False,
) -> dict[str, str]:
    """Return an engine process's variables, on top of the user's.

    Args:
        extra: Overrides the rest, but does not switch features on in unpatched engines (see :func:`stock_environment`).
        own_process: Whether the engine core runs in its own process, as for users; else it shares the caller's, which
            can access the engine's objects.
    """
    side = {"VLLM_HWPLUGIN": "1"} if patched else stock_environment(device)
    runner, process = "1" if v2_runner else "0", "1" if own_process else "0"
    environment = {**_COMMON, **side, _RUNNER: runner, _MULTIPROCESSING: process}
    if device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    features_off = {name: value for name, value in side.items() if value == "off"}
    return {**environment, **(extra or {}), **features_off}


def engine_options(device: str, *, max_model_len: int, cudagraph_mode: str, max_num_seqs: int) -> dict[str, Any]:
    """Return arguments of ``LLM`` without the model and the drafter.

    CPU: eager, in float32, because bfloat16 has near-ties whose argmax depends on the batch's shape. GPU: graphs.
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
