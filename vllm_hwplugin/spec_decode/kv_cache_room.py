# SPDX-License-Identifier: Apache-2.0
"""Leave out the plugin's graphs where the KV cache beside them would be too small.

vLLM estimates the memory of CUDA graphs before it sizes its KV cache, and ends a start whose KV cache does not hold one
request of `max_model_len` tokens. Graphs that only the plugin captures would end starts that unpatched vLLM survives.
No torch is imported here, and vLLM's executor sends `leave_graphs` to its workers by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import CAPTURE_SIZES
from vllm_hwplugin.spec_decode.capture_sizes import has_sizes, leave_to_vllm

logger = logging.getLogger("vllm.hwplugin")

#: Why there are no graphs of the plugin, also as an obstacle.
TOO_SMALL: Final = "beside them the KV cache would not hold one request of max_model_len tokens"
#: Attribute of a worker's `VllmConfig`: the plugin's graphs are left out.
GRAPHS_LEFT: Final = "_hwplugin_graphs_left"


def with_room(engine_core: Any, get_kv_cache_configs: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `get_kv_cache_configs`, which leaves out graphs if it fails.

    The patched `EngineCore._initialize_kv_caches` calls the result, which measures the available memory again without
    the plugin's graphs, and tries once more. Ranks of data parallelism that share experts have an engine core each, and
    leave out the graphs together.
    """
    return partial(_configs, engine_core, get_kv_cache_configs)


def _configs(
    engine_core: Any,
    get_kv_cache_configs: Callable[..., Any],
    vllm_config: Any,
    kv_cache_specs: Any,
    available_memory: Any,
    *groups: Any,
) -> Any:
    parallel, executor = vllm_config.parallel_config, engine_core.model_executor
    configs, failure = None, None
    try:
        configs = get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory, *groups)
    except ValueError as error:
        failure = error
    leaves, dp_group = failure is not None, getattr(engine_core, "dp_group", None)
    if getattr(parallel, "enable_elastic_ep", False):
        # A rank that joins is alone here.
        leaves = False
    elif dp_group is not None:
        # Whether any rank's failed.
        leaves = parallel.has_unfinished_dp(dp_group, leaves)
    if leaves and any(executor.collective_rpc(leave_graphs)):
        logger.warning("the plugin's graphs are left out: %s", TOO_SMALL)
        available_memory = executor.determine_available_memory()
        return get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory, *groups)
    if failure is not None:
        raise failure
    return configs


def leave_graphs(worker: Any) -> bool:
    """Leave out the plugin's graphs; return whether vLLM has counted their memory."""
    compilation, runner = worker.vllm_config.compilation_config, worker.model_runner
    if not getattr(worker, "cudagraph_memory_estimate", 0):
        return False
    vars(worker.vllm_config)[GRAPHS_LEFT] = True
    if has_sizes(compilation):
        leave_to_vllm(compilation)
        report_unused(CAPTURE_SIZES, "only the sizes that vLLM captures by itself", TOO_SMALL)
    if hasattr(runner, "tail_graphs"):
        # Graphs of the estimate stay until the real capture.
        runner.tail_graphs.forget()
    return True
