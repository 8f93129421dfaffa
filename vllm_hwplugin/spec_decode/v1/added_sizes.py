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
from vllm_hwplugin.spec_decode.capture_sizes import largest_own, leave_to_vllm
from vllm_hwplugin.spec_decode.graph_recording import attempt

_STOCK: Final = "only the sizes that vLLM captures by itself"
#: Of a runner: tokens above which a capture has failed, so that no larger one is tried.
_LARGEST: Final = "_hwplugin_largest_captured"


def guard(runner: Any) -> None:
    """Have this runner's `_warmup_and_capture` lose the plugin's sizes where one of them raises, and not end the start.

    They come before vLLM's own, which are smaller.
    """
    if "_warmup_and_capture" not in vars(runner):
        runner._warmup_and_capture = partial(_captured, runner, runner._warmup_and_capture)


def _captured(
    runner: Any, warmup_and_capture: Callable[..., None], desc: Any, *arguments: Any, **settings: Any
) -> None:
    capture = partial(warmup_and_capture, desc, *arguments, **settings)
    failed: int | None = vars(runner).get(_LARGEST)
    if failed is not None and desc.num_tokens > failed:
        return
    own = largest_own(runner.compilation_config)
    if own is None or desc.num_tokens <= own:
        capture()
        return
    wrappers = _vllms(runner)
    pool = wrappers[0].graph_pool if wrappers else None
    attempt(CAPTURE_SIZES, _STOCK, capture, partial(_forget, runner, own), pool, kernels=nullcontext)


def _vllms(runner: Any) -> list[Any]:
    """vLLM's wrappers of the target and of compiled parts, which share a pool of graphs; not the plugin's."""
    wrappers = list(CUDAGraphWrapper._all_instances)
    of_vllm = [one for one in wrappers if one is runner.model or one.runtime_mode == CUDAGraphMode.PIECEWISE]
    return [one for one in wrappers if one.graph_pool in [other.graph_pool for other in of_vllm]]


def _forget(runner: Any, own: int) -> None:
    """Have no graph of more than `own` tokens, and let vLLM go on in another pool, as after each failed capture."""
    vars(runner)[_LARGEST] = own
    leave_to_vllm(runner.compilation_config)
    of_draft = getattr(getattr(runner, "drafter", None), "cudagraph_dispatcher", None)
    for dispatcher in (runner.cudagraph_dispatcher, of_draft):
        for keys in {} if dispatcher is None else dispatcher.cudagraph_keys.values():
            keys.difference_update([key for key in keys if key.num_tokens > own])
    pool, platform = torch.cuda.graph_pool_handle(), type(current_platform)
    wrappers: Any = _vllms(runner)
    if any(one.graph_pool == platform._global_graph_pool for one in wrappers):
        platform._global_graph_pool = pool
    for wrapper in wrappers:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if batch.num_tokens > own]:
            del entries[batch]
        wrapper.graph_pool = pool
