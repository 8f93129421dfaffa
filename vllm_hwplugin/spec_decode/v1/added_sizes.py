# SPDX-License-Identifier: Apache-2.0
"""Capture of the V1 runner's graphs of sizes that the plugin added to vLLM's, and what a failure of it costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from vllm_hwplugin.features import CAPTURE_SIZES
from vllm_hwplugin.spec_decode.capture_sizes import added_sizes, has_sizes, leave_to_vllm
from vllm_hwplugin.spec_decode.graph_recording import attempt

_STOCK: Final = "only the sizes that vLLM captures by itself"


def guard(runner: Any) -> None:
    """Have a failed capture of the plugin's sizes cost these, and not the start."""
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
    """vLLM's wrappers of the target and of compiled parts, which share a pool of graphs; not the plugin's."""
    wrappers = list(CUDAGraphWrapper._all_instances)
    of_vllm = [one for one in wrappers if one is runner.model or one.runtime_mode == CUDAGraphMode.PIECEWISE]
    return [one for one in wrappers if one.graph_pool in [other.graph_pool for other in of_vllm]]


def _forget(runner: Any, added: frozenset[int]) -> None:
    """Have no graph of these sizes, and let vLLM go on in another pool, as after each failed capture."""
    leave_to_vllm(runner.compilation_config)
    of_draft = getattr(getattr(runner, "drafter", None), "cudagraph_dispatcher", None)
    for dispatcher in (runner.cudagraph_dispatcher, of_draft):
        for keys in {} if dispatcher is None else dispatcher.cudagraph_keys.values():
            keys.difference_update([key for key in keys if key.num_tokens in added])
    pool, platform = torch.cuda.graph_pool_handle(), type(current_platform)
    wrappers: Any = _vllms(runner)
    if any(one.graph_pool == platform._global_graph_pool for one in wrappers):
        platform._global_graph_pool = pool
    for wrapper in wrappers:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if batch.num_tokens in added]:
            del entries[batch]
        wrapper.graph_pool = pool
