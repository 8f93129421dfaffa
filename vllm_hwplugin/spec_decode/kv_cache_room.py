# SPDX-License-Identifier: Apache-2.0
"""Leave out the plugin's graphs where they would leave too little memory for the KV cache.

vLLM estimates the memory of CUDA graphs before it sizes its KV cache, and ends a start whose KV cache does not hold one
request of `max_model_len` tokens, or the states of `max_num_seqs` requests. Graphs that only the plugin captures would
end starts that unpatched vLLM survives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from vllm import envs

from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import CAPTURE_SIZES
from vllm_hwplugin.spec_decode.capture_sizes import has_sizes, leave_to_vllm

logger = logging.getLogger("vllm.hwplugin")

#: Why there are no graphs of the plugin, also as an obstacle.
TOO_SMALL: Final = "with these graphs the KV cache would be too small for the engine to start"
#: Attribute of a worker's `VllmConfig`: the plugin's graphs are left out.
GRAPHS_LEFT: Final = "_hwplugin_graphs_left"


def with_room(engine_core: Any, get_kv_cache_configs: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `get_kv_cache_configs`, which leaves out graphs if memory is short.

    The patched `EngineCore._initialize_kv_caches` calls the result. Ranks of data parallelism that share experts have
    an engine core each, and leave out the graphs together. With `external_launcher` each rank is an engine that cannot
    ask the others, and vLLM ends the start.
    """

    def configs_of(vllm_config: Any, kv_cache_specs: Any, available_memory: list[int], *groups: Any) -> Any:
        parallel, dp_group = vllm_config.parallel_config, getattr(engine_core, "dp_group", None)
        configs, failure = [], None
        try:
            configs = get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory, *groups)
        except ValueError as error:
            failure = error
        leaves = failure is not None or _lacks_states(vllm_config, configs)
        each_by_itself = parallel.distributed_executor_backend == "external_launcher" or (
            parallel.data_parallel_size > 1 and dp_group is None
        )
        if each_by_itself or getattr(parallel, "enable_elastic_ep", False):
            # With elastic expert parallelism a rank may join later.
            leaves = False
        elif dp_group is not None:
            leaves = parallel.has_unfinished_dp(dp_group, leaves)
        if leaves:
            freed = engine_core.model_executor.collective_rpc(leave_graphs)
            if any(freed):
                memory = [own + more for own, more in zip(available_memory, freed, strict=True)]
                return get_kv_cache_configs(vllm_config, kv_cache_specs, memory, *groups)
        if failure is not None:
            raise failure
        return configs

    return configs_of


def _lacks_states(vllm_config: Any, configs: Sequence[Any]) -> bool:
    """Whether vLLM will end the start for want of Mamba states."""
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return False
    most_reqs = vllm_config.scheduler_config.max_num_seqs
    return any(config.has_mamba_layers and config.num_blocks < most_reqs for config in configs)


def leave_graphs(worker: Any) -> int:
    """Leave out the plugin's graphs, and a copied head; return their bytes."""
    # The executor calls this in each worker.
    runner: Any = getattr(worker, "model_runner", None)
    estimated: int = getattr(worker, "cudagraph_memory_estimate", 0)
    if hasattr(runner, "tail_graphs"):
        # Graphs of the estimate stay until the real capture, and read a copied head.
        runner.tail_graphs.forget()
    copied: int = runner.leave_draft_head() if hasattr(runner, "leave_draft_head") else 0
    if not estimated or not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
        return copied
    compilation = worker.vllm_config.compilation_config
    # Much more than graphs take is what another process took meanwhile: vLLM measures the device's free memory.
    logger.warning(
        "the graphs that only the plugin captures are left out: %s (all graphs together: %.2f GiB estimated)",
        TOO_SMALL,
        estimated / 2**30,
    )
    vars(worker.vllm_config)[GRAPHS_LEFT] = True
    if has_sizes(compilation):
        leave_to_vllm(compilation)
        report_unused(CAPTURE_SIZES, "only the sizes that vLLM captures by itself", TOO_SMALL)
    # It needs a Triton with a device, which an engine core may lack.
    from vllm.v1.sample.ops import topk_topp_triton

    # The sampling of the first estimate's graphs worked in this memory.
    topk_topp_triton.reset_buffer_cache()
    with torch.inference_mode():
        worker.cudagraph_memory_estimate = int(runner.profile_cudagraph_memory())
    freed: int = copied + max(0, estimated - worker.cudagraph_memory_estimate)
    worker.available_kv_cache_memory_bytes += freed
    return freed
