# SPDX-License-Identifier: Apache-2.0
"""Which graphs of batches with prompts are larger than vLLM's own: those that were measured to win.

The larger sizes are there for FULL graphs of decode batches. vLLM captures PIECEWISE graphs of them as well, for
batches with prompts, and Model Runner V2 has FULL ones (`v2.mixed_graphs`). These save the host's launches, and cost
the device the padding: a small target gains, a large one loses. So passes are timed before the rest is captured, in
PIECEWISE graphs: a FULL one takes no longer.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin import journal
from vllm_hwplugin.spec_decode.graph_recording import (
    all_ranks,
    leave_capture,
    reserved_memory,
    settle_all_reduce,
)

logger = logging.getLogger("vllm.hwplugin")

_DECISION: Final = "capture-sizes of mixed batches"
_LAUNCHES: Final = 3


def largest_that_wins(
    sizes: Sequence[int], own: int, forward_of: Callable[[int], Callable[[CUDAGraphMode], Any]]
) -> int:
    """Tokens of the largest size whose graph wins; `own` where none does. The journal gets what was found.

    Only the largest of each octave is tried: what the graph saves is the same for each size, and what padding costs
    grows with it. Graphs of the size that wins are there afterwards; the others are gone.

    Args:
        sizes: in tokens, above vLLM's own, largest first.
        own: tokens of vLLM's largest size.
        forward_of: makes what runs a batch of that many tokens, in PIECEWISE graphs or without any.
    """
    started, reserved, said = time.perf_counter(), reserved_memory(), []
    while sizes:
        size, below = sizes[0], sizes[1] if len(sizes) > 1 else own
        graph = _seconds(partial(forward_of, size), CUDAGraphMode.PIECEWISE)
        # The smallest batch that the graph would serve.
        eager = _seconds(partial(forward_of, below + 1), CUDAGraphMode.NONE)
        said.append(f"{size} tokens in a graph take {graph * 1e3:.2f} ms, {below + 1} without {eager * 1e3:.2f}")
        if all_ranks(graph < eager):
            break
        forget(size)
        sizes = [one for one in sizes if one <= size // 2]
    largest = sizes[0] if sizes else own
    journal.note(
        _DECISION,
        f"up to {largest} tokens: {'; '.join(said)}; compared in {time.perf_counter() - started:.1f} s, "
        f"{(reserved_memory() - reserved) / 2**20:.0f} MiB",
    )
    return largest


def _seconds(make: Callable[[], Callable[[CUDAGraphMode], Any]], mode: CUDAGraphMode) -> float:
    """Of one pass, of some that the host launches in a row after the first one, which captures or tunes; infinity where
    that fails on a rank of tensor parallelism. As a rule it has no memory for it, which CUDA and its libraries say in
    several ways; or a kernel does not take as many tokens, which stock vLLM never runs at a start.

    While vLLM captures, its own all-reduce is left out of passes without a graph: the graph has to win by more then.
    """
    try:
        forward = make()
        forward(CUDAGraphMode.NONE)
        forward(mode)
        fits = True
    except Exception as failure:
        logger.info("%s: a pass in mode %s failed, so its size loses: %r", _DECISION, mode.name, failure)
        logger.debug("%s: where it failed", _DECISION, exc_info=True)
        fits = False
        for pool in {wrapper.graph_pool for wrapper in CUDAGraphWrapper._all_instances}:
            leave_capture(pool, broken=None)
        gc.collect()
        reserved_memory()
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


def forget(num_tokens: int | None = None) -> None:
    """Have vLLM's compiled parts drop their graphs, or those of one size, whose memory the next ones then use."""
    for wrapper in CUDAGraphWrapper._all_instances:
        entries = wrapper.concrete_cudagraph_entries
        for batch in [batch for batch in entries if num_tokens in (None, batch.num_tokens)]:
            del entries[batch]
