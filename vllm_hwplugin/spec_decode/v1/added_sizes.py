# SPDX-License-Identifier: Apache-2.0
"""Capture the graphs of sizes that the plugin added on the V1 runner; a failure drops only these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from vllm_hwplugin.base.features import CAPTURE_SIZES
from vllm_hwplugin.spec_decode.capture_sizes import added_sizes, has_sizes, leave_to_vllm
from vllm_hwplugin.spec_decode.graph_recording import attempt

_STOCK: Final = "only the sizes that vLLM captures by itself"


def guard(runner: Any) -> None:
    """Make a failed capture of the plugin's sizes drop only these sizes."""
    if "_warmup_and_capture" not in vars(runner):
        added = added_sizes(runner.compilation_config, runner.uniform_decode_query_len)
        runner._warmup_and_capture = partial(_captured, runner, added, runner._warmup_and_capture)


def _captured(
    runner: Any,
    added: frozenset[int],
    warmup_and_capture: Callable[..., None],
    desc: Any,
    *arguments: Any,
    **settings: Any,
) -> None:
    capture = partial(warmup_and_capture, desc, *arguments, **settings)
    if desc.num_tokens not in added:
        capture()
    elif has_sizes(runner.compilation_config):
        wrappers = _vllms(runner)
        pool = wrappers[0].graph_pool if wrappers else None
        attempt(CAPTURE_SIZES, _STOCK, capture, partial(_forget, runner, added), pool, kernels=nullcontext)


def _vllms(runner: Any) -> list[Any]:
    """Return vLLM's wrappers of target and compiled parts, which share a pool."""
    wrappers = list(CUDAGraphWrapper._all_instances)
    of_vllm = [own for own in wrappers if own is runner.model or own.runtime_mode == CUDAGraphMode.PIECEWISE]
    return [wrapper for wrapper in wrappers if wrapper.graph_pool in [other.graph_pool for other in of_vllm]]


def _forget(runner: Any, added: frozenset[int]) -> None:
    """Drop the added graphs, and give vLLM another pool after the failure."""
    leave_to_vllm(runner.compilation_config)
    of_draft = getattr(getattr(runner, "drafter", None), "cudagraph_dispatcher", None)
    for dispatcher in (runner.cudagraph_dispatcher, of_draft):
        for keys in {} if dispatcher is None else dispatcher.cudagraph_keys.values():
            keys.difference_update([key for key in keys if key.num_tokens in added])
    pool, platform = torch.cuda.graph_pool_handle(), type(current_platform)
    wrappers: Any = _vllms(runner)
    if any(wrapper.graph_pool == platform._global_graph_pool for wrapper in wrappers):
        platform._global_graph_pool = pool
    for wrapper in wrappers:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if batch.num_tokens in added]:
            del entries[batch]
        wrapper.graph_pool = pool
