# SPDX-License-Identifier: Apache-2.0
"""Which graphs Model Runner V2 captures, and which of them to estimate memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.spec_decode.capture_sizes import LARGEST, largest_mixed, largest_own, sampled
from vllm_hwplugin.spec_decode.graph_recording import known_arguments

_TARGET: Final = "ModelCudaGraphManager"
#: Of a `CompilationConfig`, what vLLM's estimate of memory leaves out.
LEFT_OUT: Final = "_hwplugin_left_out"
#: Bytes that vLLM counts for a graph at least, which an allocation of others may hide.
_LEAST: Final = 1 << 20


def settle(manager: Any, create_forward_fn: Callable[..., Any]) -> None:
    """Take back the graphs that are not to be captured; the first thing in vLLM's patched `capture`.

    Those are graphs beyond the bounds of their kind, and those that no batch or few batches get. The target's manager
    comes first, and the drafter's follow it.

    Args:
        manager: vLLM's `CudaGraphManager`.
        create_forward_fn: the argument of `capture`.
    """
    compilation = manager.compilation_config
    own, largest = largest_own(compilation), largest_mixed(compilation)
    planned = manager._capture_descs
    dropped = dict[Any, Any]()
    if own is not None and largest is not None:
        for desc in (desc for descs in planned.values() for desc in descs):
            if desc.num_tokens > max(own, LARGEST if desc.uniform_token_count else largest):
                dropped[desc] = None
    dropped |= _seldom_replayed(manager, dropped)
    for descs in planned.values():
        descs[:] = [desc for desc in descs if desc not in dropped]
    _replace_candidates(manager, dropped)
    kept = [desc for descs in planned.values() for desc in descs]
    if dropped and kept and type(manager).__name__ == _TARGET:
        # vLLM keeps what the target returns in tensors for the first batch that it captures, which need no longer be
        # the largest: so let that one come first.
        _forward_of(create_forward_fn, max(kept, key=lambda desc: desc.num_tokens))(CUDAGraphMode.NONE)
    if type(manager).__name__ == _TARGET:
        # vLLM sets it on this manager alone, and drops the drafter's with their graphs.
        vars(compilation)[LEFT_OUT] = None if getattr(manager, "_max_full_descs_to_capture", None) is None else []
    if own is not None and vars(compilation).get(LEFT_OUT) is not None:
        _sample(manager, create_forward_fn)


def _replace_candidates(manager: Any, gone: Mapping[Any, Any]) -> None:
    """Give batches another graph in place of one that is gone, or None."""
    candidates = manager._candidates
    # In 0.20 by position; many of the lists are one.
    for found in candidates.values() if isinstance(candidates, dict) else candidates:
        found[:] = [one for desc in found if (one := gone.get(desc, desc)) is not None]


def _seldom_replayed(manager: Any, dropped: Collection[Any]) -> dict[Any, Any]:
    """PIECEWISE graphs that are not worth their capture, which takes about twice as long as that of a whole graph.

    All batches of some have a FULL one, which `v2-mixed-graphs` puts in front of them. A batch without one has more
    requests than those, and as a rule more tokens than vLLM's largest size. So below that, where the sizes are the
    plugin's, only those are left without which a batch would be padded by more than a fifth.

    Args:
        manager: vLLM's `CudaGraphManager`.
        dropped: graphs that are not there.

    Returns:
        What a batch gets in place of each, or None.
    """
    planned = manager._capture_descs
    mixed = [
        desc
        for desc in planned.get(CUDAGraphMode.FULL, ())
        # Before 0.28 no graph has a bound on its requests' tokens, and those of a decode batch are uniform.
        if desc not in dropped and desc.uniform_token_count is None and getattr(desc, "max_query_len", None) is None
    ]
    requests: int = manager.max_num_reqs
    held = max((desc.num_tokens for desc in mixed if desc.num_reqs >= min(desc.num_tokens, requests)), default=0)
    pieces = [desc for desc in planned.get(CUDAGraphMode.PIECEWISE, ()) if desc not in dropped]
    own, above, found = largest_own(manager.compilation_config) or 0, None, dict[Any, Any]()
    for desc, below in zip(pieces, [*(desc.num_tokens for desc in pieces[1:]), 0], strict=False) if held else ():
        if desc.num_tokens <= held:
            found[desc] = None
        elif above is not None and desc.num_tokens <= own and below + 1 >= above.num_tokens * 4 / 5:
            found[desc] = above
        else:
            above = desc
    return found


def _sample(manager: Any, create_forward_fn: Callable[..., Any]) -> None:
    """Leave vLLM's estimate of memory a few graphs of each mode. It drops them afterwards.

    vLLM would capture two FULL graphs of the target, all of the drafter, and all PIECEWISE ones of both.
    """
    compilation, planned = manager.compilation_config, manager._capture_descs
    left_out: list[tuple[int, list[int]]] = vars(compilation)[LEFT_OUT]
    # The worker has left them out of the mode where attention has none.
    full = planned.get(CUDAGraphMode.FULL, [])
    samples = sampled(compilation, full)
    rest = [desc for desc in full if desc not in samples]
    # So many from the front.
    manager._max_full_descs_to_capture = len(samples)
    full[:] = [*samples, *rest]
    if type(manager).__name__ != _TARGET:
        # vLLM reads those of the target, and counts its graphs.
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
    # A replay of one would read what ranks of tensor parallelism have not exchanged yet, and a pass that vLLM times
    # meanwhile would look for one that is not there.
    _replace_candidates(manager, dict.fromkeys(pieces))
    pieces.clear()


def _free_memory() -> int:
    torch.accelerator.synchronize()
    free: int = torch.accelerator.get_memory_info()[0]
    return free


def left_out(manager: Any) -> int:
    """Bytes of the graphs that vLLM's estimate has neither captured nor counted.

    Args:
        manager: the target's `CudaGraphManager`, after vLLM has captured its graphs and the drafter's.
    """
    found: list[tuple[int, list[int]]] = vars(manager.compilation_config).get(LEFT_OUT) or []
    return sum(number * max(taken[-1], _LEAST) for number, taken in found if number)


def _forward_of(create_forward_fn: Callable[..., Any], desc: Any) -> Callable[[CUDAGraphMode], Any]:
    made = create_forward_fn(desc, **known_arguments(create_forward_fn, warmup=True))
    # Up to 0.25 with the attention's metadata.
    forward: Callable[[CUDAGraphMode], Any] = made[0] if isinstance(made, tuple) else made
    return forward
