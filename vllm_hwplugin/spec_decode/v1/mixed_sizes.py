# SPDX-License-Identifier: Apache-2.0
"""Which sizes above vLLM's own the V1 runner captures: `spec_decode.mixed_sizes` times the target and its drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, largest_own, settled_mixed, wants_mixed
from vllm_hwplugin.spec_decode.graph_recording import reserved_memory
from vllm_hwplugin.spec_decode.mixed_sizes import forget, largest_that_wins


def settled(runner: Any, capture_descs: list[tuple[CUDAGraphMode, list[Any]]]) -> list[tuple[CUDAGraphMode, list[Any]]]:
    """What is to be captured of it; for the patched `profile_cudagraph_memory` and `capture_model`, within vLLM's
    `graph_capture`.

    The first call finds out, and takes the sizes that lost from the dispatchers. vLLM fills these again when it has
    measured what graphs need.

    Args:
        runner: vLLM's `GPUModelRunner`.
        capture_descs: what `CudagraphDispatcher.get_capture_descs` said; not changed.
    """
    compilation = runner.compilation_config
    own = largest_own(compilation)
    if own is None:
        return capture_descs
    sizes = [desc.num_tokens for mode, descs in capture_descs for desc in descs if mode == CUDAGraphMode.PIECEWISE]
    larger = [size for size in sizes if size > own] if _compares(runner) else []
    largest = settled_mixed(compilation, lambda: _compare(runner, larger, own) if larger else own)
    bounds = {CUDAGraphMode.PIECEWISE: largest, CUDAGraphMode.FULL: max(own, LARGEST)}
    drafter = getattr(runner, "drafter", None)
    for dispatcher in (runner.cudagraph_dispatcher, getattr(drafter, "cudagraph_dispatcher", None)):
        for mode, keys in {} if dispatcher is None else dispatcher.cudagraph_keys.items():
            keys.difference_update([key for key in keys if key.num_tokens > bounds[mode]])
    kept = [(mode, [desc for desc in descs if desc.num_tokens <= bounds[mode]]) for mode, descs in capture_descs]
    return [(mode, descs) for mode, descs in kept if descs]


def _compares(runner: Any) -> bool:
    """Whether passes are timed. Stages of a pipeline would not find the same."""
    return (
        wants_mixed()
        and runner.parallel_config.pipeline_parallel_size == 1
        and "BreakableCUDAGraphWrapper" not in _wrappers(runner.model)
    )


def _wrappers(model: Any) -> Iterator[str]:
    """Names of the model's class and of those that it is wrapped in; from 0.30 on there may be two."""
    while model is not None:
        yield type(model).__name__
        model = getattr(model, "__dict__", {}).get("runnable")


def _compare(runner: Any, larger: list[int], own: int) -> int:
    largest = largest_that_wins(larger, own, partial(_forward_of, runner))
    # vLLM may be measuring what the first capture takes. A drafter's graphs may be of fewer tokens.
    forget()
    reserved_memory()
    return largest


def _forward_of(runner: Any, num_tokens: int) -> Callable[[CUDAGraphMode], Any]:
    def forward(mode: CUDAGraphMode) -> Any:
        # The drafter makes its first pass alone while vLLM captures.
        return runner._dummy_run(
            num_tokens, cudagraph_runtime_mode=mode, skip_eplb=True, remove_lora=False, is_graph_capturing=True
        )

    return forward
