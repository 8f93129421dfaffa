# SPDX-License-Identifier: Apache-2.0
"""Bound the sizes above vLLM's own on the V1 runner: `LARGEST` for decode batches, `largest_mixed` for others."""

from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, has_sizes, largest_mixed, largest_own
from vllm_hwplugin.spec_decode.v1.added_sizes import guard


def settled(runner: Any, capture_descs: list[tuple[CUDAGraphMode, list[Any]]]) -> list[tuple[CUDAGraphMode, list[Any]]]:
    """Return the part of `capture_descs` that the V1 runner captures.

    The patched `profile_cudagraph_memory` and `capture_model` call this. The dispatchers, which vLLM fills again when
    it has measured memory, also lose the other sizes.
    """
    compilation = runner.compilation_config
    if has_sizes(compilation):
        guard(runner)
    own, largest = largest_own(compilation), largest_mixed(compilation)
    if own is None or largest is None:
        return capture_descs
    bounds = {CUDAGraphMode.PIECEWISE: largest, CUDAGraphMode.FULL: max(own, LARGEST)}
    drafter = getattr(runner, "drafter", None)
    for dispatcher in (runner.cudagraph_dispatcher, getattr(drafter, "cudagraph_dispatcher", None)):
        for mode, keys in {} if dispatcher is None else dispatcher.cudagraph_keys.items():
            keys.difference_update([key for key in keys if key.num_tokens > bounds[mode]])
    bounded = [(mode, [desc for desc in descs if desc.num_tokens <= bounds[mode]]) for mode, descs in capture_descs]
    return [(mode, descs) for mode, descs in bounded if descs]
