# SPDX-License-Identifier: Apache-2.0
"""The graphs that the plugin adds on the V1 runner: which are captured, and what a failed capture of them costs.

Sizes above vLLM's own: `LARGEST` bounds decode batches, `largest_mixed` the others. FULL graphs of mixed batches
(`mixed_graphs`) have the sizes of PIECEWISE graphs. A failure drops only graphs that the plugin added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from vllm_hwplugin.base.features import CAPTURE_SIZES, V1_MIXED_GRAPHS
from vllm_hwplugin.spec_decode.capture_sizes import (
    LARGEST,
    added_sizes,
    full_mixed_sizes,
    has_sizes,
    largest_mixed,
    largest_own,
    leave_to_vllm,
    set_full_mixed_sizes,
)
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.graph_recording import attempt

_STOCK: Final = "only the sizes that vLLM captures by itself"
_FEW: Final = "_hwplugin_config_of_few"
#: What happens without FULL graphs of mixed batches, as for `report_unused`.
ONLY_DECODES: Final = "only decode batches have FULL graphs"


def settled(runner: Any, capture_descs: list[tuple[CUDAGraphMode, list[Any]]]) -> list[tuple[CUDAGraphMode, list[Any]]]:
    """Return the graphs that the V1 runner captures.

    They are a part of `capture_descs`, and FULL graphs of mixed batches. The patched `profile_cudagraph_memory` and
    `capture_model` call this. The dispatchers, which vLLM fills again when it has measured memory, also lose the other
    sizes.
    """
    compilation = runner.compilation_config
    mixed = []
    if sizes := full_mixed_sizes(compilation):
        with sized_for_few(runner):
            mixed = [runner.cudagraph_dispatcher._create_padded_batch_descriptor(size, False, False) for size in sizes]
    if (has_sizes(compilation) or mixed) and "_warmup_and_capture" not in vars(runner):
        added = added_sizes(compilation, runner.uniform_decode_query_len) if has_sizes(compilation) else frozenset()
        runner._warmup_and_capture = partial(_captured, runner, added, runner._warmup_and_capture)
    own, largest = largest_own(compilation), largest_mixed(compilation)
    if own is not None and largest is not None:
        bounds = {CUDAGraphMode.PIECEWISE: largest, CUDAGraphMode.FULL: max(own, LARGEST)}
        _drop_keys(runner, lambda mode, desc: desc.num_tokens > bounds[mode])
        capture_descs = [
            (mode, [desc for desc in descs if desc.num_tokens <= bounds[mode]]) for mode, descs in capture_descs
        ]
    if mixed:
        full = [desc for mode, descs in capture_descs if mode == CUDAGraphMode.FULL for desc in descs]
        # PIECEWISE graphs stay first. Larger graphs come before smaller ones, which use their memory again.
        capture_descs = [(mode, descs) for mode, descs in capture_descs if mode != CUDAGraphMode.FULL]
        largest_first = sorted([*mixed, *full], key=lambda desc: desc.num_tokens, reverse=True)
        capture_descs.append((CUDAGraphMode.FULL, largest_first))
    return [(mode, descs) for mode, descs in capture_descs if descs]


@contextmanager
def sized_for_few(runner: Any) -> Iterator[None]:
    """Let mixed batches' graphs have rows for `MAX_NUM_REQS` requests.

    vLLM's have rows for `max_num_seqs`, 1024 by default on a large GPU. FlashAttention 3 splits each sequence into
    equally many parts in a batch of more than 992 rows. The drafter keeps the configuration.
    """
    dispatcher = runner.cudagraph_dispatcher
    own, few = dispatcher.vllm_config, vars(dispatcher).get(_FEW)
    if few is None:
        few = vars(dispatcher)[_FEW] = copy(own)
        few.scheduler_config = copy(own.scheduler_config)
        few.scheduler_config.max_num_seqs = min(own.scheduler_config.max_num_seqs, MAX_NUM_REQS)
    runner.scheduler_config, dispatcher.vllm_config = few.scheduler_config, few
    try:
        yield
    finally:
        runner.scheduler_config, dispatcher.vllm_config = own.scheduler_config, own


def _captured(
    runner: Any,
    added: frozenset[int],
    warmup_and_capture: Callable[..., None],
    desc: Any,
    *arguments: Any,
    **settings: Any,
) -> None:
    compilation, is_mixed = runner.compilation_config, _is_mixed(runner, desc)
    is_added = desc.num_tokens in added
    if (is_added and not has_sizes(compilation)) or (is_mixed and not full_mixed_sizes(compilation)):
        # Their capture failed.
        return
    capture = partial(warmup_and_capture, desc, *arguments, **settings)
    if not (is_mixed or is_added):
        capture()
        return
    feature, effect, forget = CAPTURE_SIZES, _STOCK, partial(_forget_added, runner, added)
    if is_mixed:
        feature, effect, forget = V1_MIXED_GRAPHS, ONLY_DECODES, partial(_forget_mixed, runner)
        # Not before: vLLM prefers a FULL graph, also while it captures the PIECEWISE graph of this size.
        runner.cudagraph_dispatcher.add_cudagraph_key(CUDAGraphMode.FULL, desc)
    wrappers = _vllms(runner)
    # vLLM's captures make tensors that only this mode may change, and a failed capture is left by changing some.
    with torch.inference_mode(), sized_for_few(runner) if is_mixed else nullcontext():
        attempt(feature, effect, capture, forget, wrappers[0].graph_pool if wrappers else None, kernels=nullcontext)


def _is_mixed(runner: Any, desc: Any) -> bool:
    """Whether `desc` is a planned FULL graph of mixed batches."""
    # vLLM's PIECEWISE graphs take any number of requests.
    planned = full_mixed_sizes(runner.compilation_config) is not None
    return planned and desc.num_reqs is not None and not desc.uniform


def _drop_keys(runner: Any, unwanted: Callable[[CUDAGraphMode, Any], bool]) -> None:
    """Drop graphs from the dispatchers of target and drafter."""
    drafter = getattr(runner, "drafter", None)
    for dispatcher in (runner.cudagraph_dispatcher, getattr(drafter, "cudagraph_dispatcher", None)):
        for mode, keys in {} if dispatcher is None else dispatcher.cudagraph_keys.items():
            keys.difference_update([key for key in keys if unwanted(mode, key)])


def _vllms(runner: Any) -> list[Any]:
    """Return vLLM's wrappers of target and compiled parts, which share a pool."""
    wrappers = list(CUDAGraphWrapper._all_instances)
    of_vllm = [own for own in wrappers if own is runner.model or own.runtime_mode == CUDAGraphMode.PIECEWISE]
    return [wrapper for wrapper in wrappers if wrapper.graph_pool in [other.graph_pool for other in of_vllm]]


def _forget_added(runner: Any, added: frozenset[int]) -> None:
    leave_to_vllm(runner.compilation_config)
    _forget(runner, lambda desc: desc.num_tokens in added)


def _forget_mixed(runner: Any) -> None:
    set_full_mixed_sizes(runner.compilation_config, ())
    _forget(runner, partial(_is_mixed, runner))


def _forget(runner: Any, gone: Callable[[Any], bool]) -> None:
    """Drop the plugin's graphs, and replace the pool after a failure."""
    _drop_keys(runner, lambda _, desc: gone(desc))
    pool, platform = torch.cuda.graph_pool_handle(), type(current_platform)
    wrappers: Any = _vllms(runner)
    if any(wrapper.graph_pool == platform._global_graph_pool for wrapper in wrappers):
        platform._global_graph_pool = pool
    for wrapper in wrappers:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if gone(batch)]:
            del entries[batch]
        wrapper.graph_pool = pool
