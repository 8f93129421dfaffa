# SPDX-License-Identifier: Apache-2.0
"""Choose the graphs that Model Runner V2 captures, and the few that estimate memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, largest_mixed, largest_own, sampled
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.v2.mixed_bounds import MOST_REQS
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import is_mixed

_TARGET: Final = "ModelCudaGraphManager"
#: Attribute of a `CompilationConfig`: graphs that vLLM's memory estimate leaves out, as (count, samples in bytes).
LEFT_OUT: Final = "_hwplugin_left_out"
#: Attribute of a `CompilationConfig` with graphs of mixed batches: whether batches with images or long
#: requests run in PIECEWISE graphs.
KEEPS_PIECES: Final = "_hwplugin_keeps_pieces"
#: Bytes that vLLM counts for a graph at least. Another allocation may hide a graph's own bytes.
_LEAST: Final = 1 << 20


def settle(manager: Any, create_forward_fn: Callable[..., Any]) -> None:
    """Remove planned graphs that are too large or seldom replayed.

    vLLM's patched `capture` calls this first: for the target's `CudaGraphManager`, then for the drafter's. Each kind of
    graph has its own largest size.
    """
    compilation = manager.compilation_config
    own, largest = largest_own(compilation), largest_mixed(compilation)
    planned = manager._capture_descs
    dropped = dict[Any, Any]()
    if own is not None and largest is not None:
        spec = manager.vllm_config.speculative_config
        block = 1 + (0 if spec is None else spec.num_speculative_tokens)

        def most(desc: Any) -> int:
            if desc.uniform_token_count:
                # A drafter's later passes have one token of each request of the target's batch.
                return max(own, LARGEST * int(desc.uniform_token_count) // block)
            # With adaptive verification decode batches have no uniform count, and the larger ones replay mixed graphs.
            of_decodes = desc.cg_mode == CUDAGraphMode.FULL and not is_mixed(compilation, desc)
            return own if of_decodes else largest

        every = (desc for descs in planned.values() for desc in descs)
        dropped = {desc: None for desc in every if desc.num_tokens > most(desc)}
    dropped |= _seldom_replayed(manager, dropped)
    for descs in planned.values():
        descs[:] = [desc for desc in descs if desc not in dropped]
    _replace_candidates(manager, dropped)
    remaining = [desc for descs in planned.values() for desc in descs]
    changed = dropped or KEEPS_PIECES in vars(compilation)
    if changed and remaining and type(manager).__name__ == _TARGET:
        # vLLM allocates the target's output tensors for the first batch that it captures. That batch may not be the
        # largest, so run the largest first.
        _forward_of(create_forward_fn, max(remaining, key=lambda desc: desc.num_tokens))(CUDAGraphMode.NONE)
    if type(manager).__name__ == _TARGET:
        # vLLM sets `_max_full_descs_to_capture` on this manager only, and drops the drafter's with their graphs.
        vars(compilation)[LEFT_OUT] = None if getattr(manager, "_max_full_descs_to_capture", None) is None else []
    if own is not None and vars(compilation).get(LEFT_OUT) is not None:
        _sample(manager, create_forward_fn)


def _replace_candidates(manager: Any, gone: Mapping[Any, Any]) -> None:
    """Replace each graph that is gone among the candidates; None removes it."""
    candidates = manager._candidates
    # A list by position in 0.20; many of its items are the same list.
    for descs in candidates.values() if isinstance(candidates, dict) else candidates:
        descs[:] = [substitute for desc in descs if (substitute := gone.get(desc, desc)) is not None]


def _seldom_replayed(manager: Any, dropped: Collection[Any]) -> dict[Any, Any]:
    """Return PIECEWISE graphs not worth their capture, with their substitute or None.

    A PIECEWISE graph takes about twice as long to capture as a FULL graph. Some only cover batches that have a FULL
    graph, which `v2-mixed-graphs` puts first. A batch without a FULL graph has more requests than the FULL graphs hold,
    and usually more tokens than vLLM's largest size; more than `MOST_REQS` requests do not count. So if the sizes are
    the plugin's, a graph up to vLLM's largest size stays only if a batch would otherwise be padded by more than a
    fifth. Without drafts these stay, because such a batch may have as few tokens as requests. All stay if a batch with
    an image or a long request replays no FULL graph. `dropped` are graphs already removed.
    """
    if vars(manager.compilation_config).get(KEEPS_PIECES):
        return {}
    planned = manager._capture_descs
    mixed = [
        desc
        for desc in planned.get(CUDAGraphMode.FULL, ())
        # Before 0.28 no graph bounds the tokens of a request, and the graphs of decode batches are uniform.
        if desc not in dropped and desc.uniform_token_count is None and getattr(desc, "max_query_len", None) is None
    ]
    requests: int = min(manager.max_num_reqs, MOST_REQS)
    gap = 4 / 5 if manager.decode_query_len > 1 else 1
    held = max((desc.num_tokens for desc in mixed if desc.num_reqs >= min(desc.num_tokens, requests)), default=0)
    pieces = [desc for desc in planned.get(CUDAGraphMode.PIECEWISE, ()) if desc not in dropped]
    own, above, substitutes = largest_own(manager.compilation_config) or 0, None, dict[Any, Any]()
    for desc, below in zip(pieces, [*(desc.num_tokens for desc in pieces[1:]), 0], strict=False) if held else ():
        if desc.num_tokens <= held:
            substitutes[desc] = None
        elif above is not None and desc.num_tokens <= own and below + 1 >= above.num_tokens * gap:
            substitutes[desc] = above
        else:
            above = desc
    return substitutes


def _sample(manager: Any, create_forward_fn: Callable[..., Any]) -> None:
    """Plan only a few graphs of each mode for vLLM's memory estimate."""
    # vLLM would capture two FULL graphs of the target, all of the drafter, and all PIECEWISE graphs of both. It drops
    # the graphs after the estimate.
    compilation, planned = manager.compilation_config, manager._capture_descs
    left_out: list[tuple[int, list[int]]] = vars(compilation)[LEFT_OUT]
    # The mode has no FULL graphs if attention has none: the worker removed them.
    full = planned.get(CUDAGraphMode.FULL, [])
    samples = sampled(compilation, full)
    rest = [desc for desc in full if desc not in samples]
    # vLLM captures this many from the front.
    manager._max_full_descs_to_capture = len(samples)
    full[:] = [*samples, *rest]
    if type(manager).__name__ != _TARGET:
        # vLLM reads only the target's samples, and counts the target's graphs.
        manager._capture_mem_samples = []
        left_out.append((len(rest), manager._capture_mem_samples))
        _replace_candidates(manager, dict.fromkeys(rest))
    pieces = planned.get(CUDAGraphMode.PIECEWISE, [])
    if manager.use_breakable_cg or not pieces:
        return
    taken, samples = 0, sampled(compilation, pieces)
    for desc in samples:
        forward = _forward_of(create_forward_fn, desc)
        forward(CUDAGraphMode.NONE)
        before = _free_memory()
        forward(CUDAGraphMode.PIECEWISE)
        taken = before - _free_memory()
    left_out.append((len(pieces) - len(samples), [taken]))
    # A replay of a PIECEWISE graph would read addresses that tensor-parallel ranks have not exchanged yet, and a pass
    # that vLLM times meanwhile would look for a graph that is not there.
    _replace_candidates(manager, dict.fromkeys(pieces))
    pieces.clear()


def _free_memory() -> int:
    torch.accelerator.synchronize()
    return int(torch.accelerator.get_memory_info()[0])


def left_out(manager: Any) -> int:
    """Return the bytes of the graphs that vLLM's estimate leaves out.

    Args:
        manager: the target's `CudaGraphManager`, after vLLM has captured its graphs and the drafter's.
    """
    graphs: list[tuple[int, list[int]]] = vars(manager.compilation_config).get(LEFT_OUT) or []
    return sum(number * max(taken[-1], _LEAST) for number, taken in graphs if number)


def _forward_of(create_forward_fn: Callable[..., Any], desc: Any) -> Callable[[CUDAGraphMode], Any]:
    made = create_forward_fn(desc, **known_arguments(create_forward_fn, warmup=True))
    # Up to 0.25 a pair with the attention metadata.
    forward: Callable[[CUDAGraphMode], Any] = made[0] if isinstance(made, tuple) else made
    return forward
