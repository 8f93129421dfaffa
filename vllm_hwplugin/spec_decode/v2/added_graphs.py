# SPDX-License-Identifier: Apache-2.0
"""Capture the plugin's graphs together with vLLM's, and only vLLM's if that fails (Model Runner V2).

vLLM captures larger sizes (`capture_sizes`) and batches of any shape (`mixed_graphs`) as it captures its own graphs. An
error there would end a start that unpatched vLLM survives. So vLLM's `capture` runs inside `attempt`, and if that
fails, a second time with only the graphs that unpatched vLLM plans.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.platforms import current_platform

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import CAPTURE_SIZES, V2_MIXED_GRAPHS
from vllm_hwplugin.spec_decode.capture_sizes import has_sizes, leave_to_vllm, vllms_sizes
from vllm_hwplugin.spec_decode.graph_recording import agreed, attempt, exchanged_later
from vllm_hwplugin.spec_decode.ranks import Beyond
from vllm_hwplugin.spec_decode.v2.mixed_bounds import has_mixed_graphs, set_mixed_graphs
from vllm_hwplugin.spec_decode.v2.mixed_sizes import LEFT_OUT

_STOCK: Final = "only the graphs that vLLM captures by itself"
_TARGET: Final = "ModelCudaGraphManager"
#: Attributes of a `CompilationConfig`: whether vLLM is estimating memory, whether the plugin's graphs have failed, and
#: the replacement of each graph pool.
_PROFILES: Final = "_hwplugin_profiles"
_FAILED: Final = "_hwplugin_added_failed"
_POOLS: Final = "_hwplugin_pools"
#: Attribute of the target's manager, and of a `CompilationConfig` for the drafter's: the stream of the captures.
_STREAM: Final = "_hwplugin_capture_stream"
#: Attribute of a manager: whether its `capture` runs inside `captured`, or only vLLM's graphs are left.
_SETTLED: Final = "_hwplugin_settled"


def captured(
    manager: Any,
    capture: Callable[..., Any],
    create_forward_fn: Callable[..., Any],
    progress_bar_desc: str,
    settle: Callable[[Any, Callable[..., Any]], None] | None = None,
) -> tuple[Any, ...]:
    """Capture a manager's graphs, including the plugin's.

    vLLM's patched `capture` calls this first.

    Args:
        manager: vLLM's `CudaGraphManager`.
        capture: vLLM's unbound method, called with `create_forward_fn` and `progress_bar_desc`.
        settle: removes graphs that are not worth their capture.

    Returns:
        The result of vLLM's `capture` as the only item. Empty if vLLM must capture: there are no graphs of the plugin,
        or their capture failed and they are removed.

    Raises:
        FeatureRequired: the capture failed, and the switch of the feature that added graphs is `on`.
    """
    compilation, marks = manager.compilation_config, vars(manager)
    target = type(manager).__name__ == _TARGET
    owner = manager if target else compilation
    if marks.get(_SETTLED):
        _capture_on_one_stream(owner)
        return ()
    if target:
        vars(compilation)[_PROFILES] = getattr(manager, "_max_full_descs_to_capture", None) is not None
    manager.pool = vars(compilation).get(_POOLS, {}).get(manager.pool, manager.pool)
    mixed = has_mixed_graphs(compilation)
    if _FAILED in vars(compilation):
        marks[_SETTLED] = True
        _begin_anew(manager)
        return ()
    if not mixed and not has_sizes(compilation):
        # Of an earlier estimate, after which the plugin's graphs were left out.
        vars(compilation).pop(LEFT_OUT, None)
        return ()
    pieces = {id(wrapper): set(wrapper.concrete_cudagraph_entries) for wrapper in CUDAGraphWrapper._all_instances}
    # Ranks of data parallelism pad a batch to the same graph, and so do stages of a pipeline.
    beyond = Beyond.DATA_PARALLEL | (Beyond.STAGES if target else Beyond.NONE)
    measured = {name: marks.get(name) for name in ("_max_full_descs_to_capture", "_capture_mem_samples")}
    done: list[Any] = []

    def record() -> None:
        forward = agreed(create_forward_fn, beyond)
        if settle is not None:
            settle(manager, forward)
        with exchanged_later():
            done.append(capture(manager, forward, progress_bar_desc))

    def forget() -> None:
        for wrapper in CUDAGraphWrapper._all_instances:
            entries = wrapper.concrete_cudagraph_entries
            for batch in set(entries) - pieces.get(id(wrapper), set()):
                del entries[batch]
        marks.update({name: value for name, value in measured.items() if name in marks})
        if measured["_capture_mem_samples"]:
            measured["_capture_mem_samples"].clear()
        vars(compilation).pop(LEFT_OUT, None)
        one_stage = manager.vllm_config.parallel_config.pipeline_parallel_size == 1
        if target or (vars(compilation)[_PROFILES] and one_stage):
            # A drafter's graph of a mixed batch reads what the target's graph writes. The stages of a pipeline have the
            # same graphs of the target, and only the last stage has a drafter.
            vars(compilation)[_FAILED] = True
            if has_sizes(compilation):
                leave_to_vllm(compilation)
                run_records.use(CAPTURE_SIZES, False, "capturing graphs of its sizes failed")
            if mixed:
                set_mixed_graphs(compilation, {})
        _begin_anew(manager)
        _leave_pool(manager)

    marks[_SETTLED] = True
    _capture_on_one_stream(owner)
    feature = V2_MIXED_GRAPHS if mixed else CAPTURE_SIZES
    if attempt(feature, _STOCK, record, forget, manager.pool, kernels=nullcontext, beyond=beyond):
        marks[_SETTLED] = False
        return tuple(done)
    if mixed and has_mixed_graphs(compilation):
        run_records.use(V2_MIXED_GRAPHS, True)
    return ()


def _capture_on_one_stream(owner: Any) -> None:
    """Continue on the stream of the owner's earlier captures.

    A graph uses memory again that its pool gave to an earlier graph of the same stream. vLLM's `graph_capture`, in
    which this runs, makes a new stream each time: for each manager, and again for the `capture` inside `captured`, so
    samples of the memory estimate would share no memory with that capture. A drafter's managers have one stream: vLLM
    copies what the later passes read of the first pass before they run, so a replay may overwrite the rest. Up to 0.28
    vLLM captured all FULL graphs on one stream.
    """
    made = torch.cuda.current_stream()
    stream = vars(owner).setdefault(_STREAM, made)
    stream.wait_stream(made)
    # The end of `graph_capture` restores the stream before it.
    torch.cuda.set_stream(stream)


def _begin_anew(manager: Any) -> None:
    """Reset a manager's plan to the graphs of unpatched vLLM."""
    manager.graphs.clear()
    manager._candidates.clear()
    manager._capture_descs.clear()
    with vllms_sizes(manager.compilation_config):
        manager._init_candidates()
    if type(manager).__name__ == _TARGET:
        # Allocated for the largest graph, which may be gone.
        manager.hidden_states, manager.aux_hidden_states, manager.intermediate_tensors = None, [], None


def _leave_pool(manager: Any) -> None:
    """Replace the graph pool, which an ended capture may leave in disorder."""
    # There is only one pool that vLLM's sleep mode offloads, and vLLM keeps using it.
    before, after = manager.pool, torch.cuda.graph_pool_handle()
    vars(manager.compilation_config).setdefault(_POOLS, {})[before] = after
    manager.pool = after
    for wrapper in CUDAGraphWrapper._all_instances:
        if wrapper.graph_pool == before:
            wrapper.graph_pool = after
    platform: Any = type(current_platform)
    if platform._global_graph_pool == before:
        platform._global_graph_pool = after
