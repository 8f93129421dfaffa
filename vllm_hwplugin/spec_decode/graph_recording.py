# SPDX-License-Identifier: Apache-2.0
"""How vLLM's own methods are recorded into a CUDA graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id


def known_arguments(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of `arguments` that `function` takes in this vLLM."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


def free_memory() -> int:
    """Bytes that nobody uses of the device."""
    free: int = torch.accelerator.get_memory_info()[0]
    return free


def record_graph(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Record `run` on the current stream, which is not the default one.

    It is called once before: kernels that compile or tune themselves may not do so meanwhile. `torch.cuda.graph` would
    give the allocator's memory back to the device around each of some hundred recordings.
    """
    run()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Collectives in symmetric memory leave it for a while.
    set_graph_pool_id(pool)
    graph.capture_begin(pool=pool)
    try:
        run()
    finally:
        graph.capture_end()
    return graph
