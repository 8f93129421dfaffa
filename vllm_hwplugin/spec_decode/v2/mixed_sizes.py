# SPDX-License-Identifier: Apache-2.0
"""Which graphs of mixed batches are larger than vLLM's own on Model Runner V2: those that were measured to win.

The larger sizes are there for FULL graphs of decode batches. vLLM would capture PIECEWISE graphs of them as well, for
batches with prompts, and `mixed_graphs` has FULL ones. These save the host's launches, and cost the device the padding:
a small target gains, a large one loses. So the target's passes are timed before the rest is captured, in PIECEWISE
graphs: a FULL one takes no longer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin import journal
from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, largest_own, wants_mixed
from vllm_hwplugin.spec_decode.graph_recording import (
    all_ranks,
    known_arguments,
    reserved_memory,
    settle_all_reduce,
)

_DECISION: Final = "capture-sizes of mixed batches"
_LAUNCHES: Final = 3
_TARGET: Final = "ModelCudaGraphManager"
# On the `CompilationConfig`: tokens of the largest graph that was found to win.
_LARGEST: Final = "_hwplugin_largest_mixed"


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
    if _LARGEST not in vars(compilation):
        pieces = [desc for desc in larger if desc.cg_mode == CUDAGraphMode.PIECEWISE and _compares(manager)]
        vars(compilation)[_LARGEST] = _compare(pieces, own, create_forward_fn) if pieces else own
    largest = vars(compilation)[_LARGEST]
    # The sizes for batches with prompts are decode batches' as well.
    of_decodes = max(largest, LARGEST)
    dropped = {one for one in larger if one.num_tokens > (of_decodes if one.uniform_token_count else largest)}
    for descs in planned.values():
        descs[:] = [desc for desc in descs if desc not in dropped]
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


def _compare(larger: Sequence[Any], own: int, create_forward_fn: Callable[..., Any]) -> int:
    """Tokens of the largest size whose graph wins; `own` where none does.

    Only the largest of each octave is tried: what the graph saves is the same for each size, and what padding costs
    grows with it.

    Args:
        larger: vLLM's descriptors of PIECEWISE graphs, largest first.
    """
    started, reserved, said = time.perf_counter(), reserved_memory(), []
    while larger:
        desc, below = larger[0], larger[1].num_tokens if len(larger) > 1 else own
        graph = _seconds(create_forward_fn, desc, CUDAGraphMode.PIECEWISE)
        # The smallest batch that the graph would serve.
        eager = _seconds(create_forward_fn, dataclasses.replace(desc, num_tokens=below + 1), CUDAGraphMode.NONE)
        said.append(
            f"{desc.num_tokens} tokens in a graph take {graph * 1e3:.2f} ms, {below + 1} without {eager * 1e3:.2f}"
        )
        if all_ranks(graph < eager):
            break
        _forget(desc.num_tokens)
        larger = [one for one in larger if one.num_tokens <= desc.num_tokens // 2]
    largest: int = larger[0].num_tokens if larger else own
    journal.note(
        _DECISION,
        f"up to {largest} tokens: {'; '.join(said)}; compared in {time.perf_counter() - started:.1f} s, "
        f"{(reserved_memory() - reserved) / 2**20:.0f} MiB",
    )
    return largest


def _seconds(create_forward_fn: Callable[..., Any], desc: Any, mode: CUDAGraphMode) -> float:
    """Of one pass, of some that the host launches in a row after the first one, which captures or tunes; infinity where
    a rank of tensor parallelism has no memory for it.

    While vLLM captures, its own all-reduce is left out of passes without a graph: the graph has to win by more then.
    """
    forward = _forward_of(create_forward_fn, desc)
    try:
        forward(CUDAGraphMode.NONE)
        forward(mode)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    fits = all_ranks(fits)
    settle_all_reduce()
    if not fits:
        return math.inf
    torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        forward(mode)
    torch.accelerator.synchronize()
    return (time.perf_counter() - started) / _LAUNCHES


def _forward_of(create_forward_fn: Callable[..., Any], desc: Any) -> Callable[[CUDAGraphMode], Any]:
    made = create_forward_fn(desc, **known_arguments(create_forward_fn, warmup=True))
    # Up to 0.25 with the attention's metadata.
    forward: Callable[[CUDAGraphMode], Any] = made[0] if isinstance(made, tuple) else made
    return forward


def _forget(num_tokens: int) -> None:
    """Have vLLM's compiled parts drop their graphs of this size, whose memory the next ones then use."""
    for wrapper in CUDAGraphWrapper._all_instances:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if batch.num_tokens == num_tokens]:
            del entries[batch]
