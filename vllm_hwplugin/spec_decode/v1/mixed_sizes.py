# SPDX-License-Identifier: Apache-2.0
"""The sizes above vLLM's own on the V1 runner: which are captured, and what a failed capture of them costs.

`LARGEST` bounds decode batches, `largest_mixed` the others. A failure drops only the sizes that the plugin added.
"""

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
from vllm_hwplugin.spec_decode.capture_sizes import (
    LARGEST,
    added_sizes,
    has_sizes,
    largest_mixed,
    largest_own,
    leave_to_vllm,
)
from vllm_hwplugin.spec_decode.graph_recording import attempt

_STOCK: Final = "only the sizes that vLLM captures by itself"


def settled(runner: Any, capture_descs: list[tuple[CUDAGraphMode, list[Any]]]) -> list[tuple[CUDAGraphMode, list[Any]]]:
    """Return the part of `capture_descs` that the V1 runner captures.

    The patched `profile_cudagraph_memory` and `capture_model` call this. The dispatchers, which vLLM fills again when
    it has measured memory, also lose the other sizes.
    """
    compilation = runner.compilation_config
    if has_sizes(compilation) and "_warmup_and_capture" not in vars(runner):
        added = added_sizes(compilation, runner.uniform_decode_query_len)
        runner._warmup_and_capture = partial(_captured, runner, added, runner._warmup_and_capture)
    own, largest = largest_own(compilation), largest_mixed(compilation)
    if own is None or largest is None:
        return capture_descs
    bounds = {CUDAGraphMode.PIECEWISE: largest, CUDAGraphMode.FULL: max(own, LARGEST)}
    _drop_keys(runner, lambda mode, size: size > bounds[mode])
    bounded = [(mode, [desc for desc in descs if desc.num_tokens <= bounds[mode]]) for mode, descs in capture_descs]
    return [(mode, descs) for mode, descs in bounded if descs]


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
        # vLLM's captures make tensors that only this mode may change, and a failed capture is left by changing some.
        with torch.inference_mode():
            attempt(CAPTURE_SIZES, _STOCK, capture, partial(_forget, runner, added), pool, kernels=nullcontext)


def _drop_keys(runner: Any, unwanted: Callable[[CUDAGraphMode, int], bool]) -> None:
    """Drop sizes from the dispatchers of target and drafter."""
    drafter = getattr(runner, "drafter", None)
    for dispatcher in (runner.cudagraph_dispatcher, getattr(drafter, "cudagraph_dispatcher", None)):
        for mode, keys in {} if dispatcher is None else dispatcher.cudagraph_keys.items():
            keys.difference_update([key for key in keys if unwanted(mode, key.num_tokens)])


def _vllms(runner: Any) -> list[Any]:
    """Return vLLM's wrappers of target and compiled parts, which share a pool."""
    wrappers = list(CUDAGraphWrapper._all_instances)
    of_vllm = [own for own in wrappers if own is runner.model or own.runtime_mode == CUDAGraphMode.PIECEWISE]
    return [wrapper for wrapper in wrappers if wrapper.graph_pool in [other.graph_pool for other in of_vllm]]


def _forget(runner: Any, added: frozenset[int]) -> None:
    """Drop the added graphs, and give vLLM another pool after the failure."""
    leave_to_vllm(runner.compilation_config)
    _drop_keys(runner, lambda _, size: size in added)
    pool, platform = torch.cuda.graph_pool_handle(), type(current_platform)
    wrappers: Any = _vllms(runner)
    if any(wrapper.graph_pool == platform._global_graph_pool for wrapper in wrappers):
        platform._global_graph_pool = pool
    for wrapper in wrappers:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if batch.num_tokens in added]:
            del entries[batch]
        wrapper.graph_pool = pool
