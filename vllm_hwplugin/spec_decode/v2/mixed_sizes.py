# SPDX-License-Identifier: Apache-2.0
"""Which sizes above vLLM's own Model Runner V2 captures: `spec_decode.mixed_sizes` times the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.capture_sizes import largest_own, sampled, settled_bounds, wants_mixed
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.mixed_sizes import largest_that_wins

_TARGET: Final = "ModelCudaGraphManager"


def settle(manager: Any, create_forward_fn: Callable[..., Any]) -> None:
    """Take back the graphs of mixed batches that are not to be captured; the first thing in vLLM's patched `capture`.

    The target's manager comes first, and the drafter's follow it. From 0.29 on vLLM captures once more before, to
    measure memory: what is found then holds.

    Args:
        manager: vLLM's `CudaGraphManager`.
        create_forward_fn: the argument of `capture`.
    """
    compilation = manager.compilation_config
    own = largest_own(compilation)
    planned = manager._capture_descs
    larger = [desc for descs in planned.values() for desc in descs if own is not None and desc.num_tokens > own]
    if not larger:
        return
    assert own is not None
    pieces = [desc for desc in larger if desc.cg_mode == CUDAGraphMode.PIECEWISE and _compares(manager)]

    def forward_of(num_tokens: int) -> Callable[[CUDAGraphMode], Any]:
        return _forward_of(create_forward_fn, dataclasses.replace(pieces[0], num_tokens=num_tokens))

    sizes = [desc.num_tokens for desc in pieces]
    largest, of_decodes = settled_bounds(
        compilation, lambda: largest_that_wins(sizes, own, forward_of) if sizes else own
    )
    dropped = {one for one in larger if one.num_tokens > (of_decodes if one.uniform_token_count else largest)}
    for descs in planned.values():
        descs[:] = [desc for desc in descs if desc not in dropped]
    # vLLM captures so many from the front to estimate memory, by a manager that it then drops.
    if getattr(manager, "_max_full_descs_to_capture", None) is not None:
        # The worker has left them out of the mode where attention has none.
        full = planned.get(CUDAGraphMode.FULL, [])
        samples = sampled(compilation, full)
        full[:] = [*samples, *(desc for desc in full if desc not in samples)]
        manager._max_full_descs_to_capture = len(samples)
    candidates = manager._candidates
    # In 0.20 by position; many of the lists are one.
    for found in candidates.values() if isinstance(candidates, dict) else candidates:
        found[:] = [desc for desc in found if desc not in dropped]
    if dropped and type(manager).__name__ == _TARGET:
        # vLLM keeps what the target returns in tensors for the first batch that it captures, which need no longer be
        # the largest: so let that one come first.
        kept = [desc for descs in planned.values() for desc in descs]
        _forward_of(create_forward_fn, max(kept, key=lambda desc: desc.num_tokens))(CUDAGraphMode.NONE)


def _compares(manager: Any) -> bool:
    """Whether the target's passes are timed. Stages of a pipeline would not find the same."""
    return (
        wants_mixed()
        and type(manager).__name__ == _TARGET
        and manager.vllm_config.parallel_config.pipeline_parallel_size == 1
        and not getattr(manager, "use_breakable_cg", False)
    )


def _forward_of(create_forward_fn: Callable[..., Any], desc: Any) -> Callable[[CUDAGraphMode], Any]:
    made = create_forward_fn(desc, **known_arguments(create_forward_fn, warmup=True))
    # Up to 0.25 with the attention's metadata.
    forward: Callable[[CUDAGraphMode], Any] = made[0] if isinstance(made, tuple) else made
    return forward
