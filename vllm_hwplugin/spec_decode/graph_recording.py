# SPDX-License-Identifier: Apache-2.0
"""How vLLM's own methods are recorded into CUDA graphs, and what happens where that fails.

No list of what cannot be recorded is complete: a model may wait for the device in its `compute_logits`, and memory may
run out. So each feature records inside `attempt`, and a start goes on without the graphs that failed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from packaging.version import Version
from vllm import _custom_ops, envs
from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
from vllm.distributed.parallel_state import get_tp_group, graph_capture, model_parallel_is_initialized
from vllm.v1.sample.ops import topk_topp_triton

from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.fallback import FeatureRequired, in_a_line, stays_stock

try:
    from vllm.compilation.cudagraph_pool import capture_pool
except ImportError:
    # Up to 0.31 there is no other pool than the caller's.
    @contextmanager
    def capture_pool(pool: Any, vllm_config: Any) -> Iterator[Any]:
        set_graph_pool_id(pool)
        yield pool


logger = logging.getLogger("vllm.hwplugin")

_TRITON_CACHE: Final = "TRITON_CACHE_DIR"
#: Of the user; vLLM names a folder later, while it compiles.
_OF_USER: Final = os.environ.get(_TRITON_CACHE)


#: The method of vLLM's `CustomAllreduce` by which ranks exchange what was recorded.
_EXCHANGE: Final = "register_graph_buffers"
#: Whether a `torch.cuda.CUDAGraph` whose `capture_end` failed releases its pool when it is destroyed. Where it does, a
#: second release ends the process: the destructor throws.
_GRAPH_RELEASES_POOL: Final = Version(torch.__version__).release >= (2, 14)


class RecordingFailed(HwpluginError, RuntimeError):
    """A recording that failed on a rank of tensor parallelism, as every rank knows."""


def known_arguments(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of `arguments` that `function` takes in this vLLM."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


def reserved_memory() -> int:
    """Bytes of the device that this process's allocator holds, without those that it would give back.

    It leaves out other processes, and what CUDA itself needs for a graph.
    """
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    reserved: int = torch.accelerator.memory_reserved()
    return reserved


def shared_scratch() -> list[torch.Tensor]:
    """Memory in which vLLM's kernels for top-k and top-p work, whatever the batch.

    vLLM lets it go when a larger batch comes, and takes more. A graph of these kernels goes on with the memory that it
    was recorded with, so the owner of the graph has to keep that, too.
    """
    return list(topk_topp_triton._TRITON_BUFFER_CACHE.values())


def attempt(
    feature: str,
    effect: str,
    record: Callable[[], object],
    forget: Callable[[], None],
    pool: Any = None,
    *,
    kernels: Callable[[], AbstractContextManager[None]] | None = None,
) -> bool:
    """Have a feature record its graphs; if that fails, have it forget them, and let the start go on.

    With tensor parallelism it fails on all ranks where it fails on one, so all ranks have to call this in one order. A
    rank that fails between kernels that talk to others leaves these waiting on the device: nothing can help them.

    Args:
        feature: one of `features`.
        effect: what happens without the graphs, as `stays_stock` says it.
        record: records, by `record_graph` or by vLLM's own wrapper.
        forget: drops all graphs of the feature, and what was made for them.
        pool: of graphs that vLLM's wrapper records; None where `record_graph` does.
        kernels: a context for `record`; by default `kept_kernels`.

    Returns:
        Whether all was recorded.

    Raises:
        FeatureRequired: something failed, and the feature's gate says `on`.
    """
    try:
        with (kernels or kept_kernels)():
            record()
        if all_ranks(True):
            return True
        reason = "it failed on another rank"
    except FeatureRequired:
        raise
    except RecordingFailed as failure:
        reason = str(failure)
    except Exception as failure:
        all_ranks(False)
        reason = in_a_line(failure)
        logger.debug("%s: recording failed", feature, exc_info=True)
        if pool is not None:
            leave_capture(pool, broken=None)
    settle_all_reduce()
    forget()
    # A failure may be in a circle with its frames, and these hold what the failed run had made.
    gc.collect()
    # Waits for what still uses the memory, and gives it back.
    reserved_memory()
    stays_stock(feature, effect, f"recording graphs failed: {reason}", level=logging.WARNING)
    return False


def attempt_capture(
    feature: str, effect: str, capture: Callable[[], object], managers: Sequence[Any], device: torch.device
) -> bool:
    """Have vLLM's managers capture graphs that a feature changed; if that fails, leave them without any.

    Args:
        feature: one of `features`.
        effect: what happens without these graphs, as `stays_stock` says it.
        capture: calls vLLM's methods.
        managers: all `CudaGraphManager` that `capture` fills.
        device: of the runner.

    Returns:
        Whether all was captured.

    Raises:
        FeatureRequired: something failed, and the feature's gate says `on`.
    """

    def record() -> None:
        with exchanged_later():
            capture()

    def forget() -> None:
        # A capture that CUDA has ended may have left the pool in disorder.
        pool = torch.cuda.graph_pool_handle()
        for manager in managers:
            manager.graphs.clear()
            manager._graphs_captured, manager.pool = False, pool

    with graph_capture(device=device):
        return attempt(feature, effect, record, forget, managers[0].pool, kernels=nullcontext)


def _own_cache() -> str | None:
    """A folder in vLLM's cache; None where vLLM has none, or this user may not write there."""
    folder = os.path.join(envs.VLLM_CACHE_ROOT, "vllm_hwplugin", "triton")
    if not os.path.isdir(envs.VLLM_CACHE_ROOT):
        return None
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Have Triton keep the kernels that it compiles where each start of vLLM finds them, in vLLM's own cache.

    While vLLM compiles a model it names a folder of that model for them, and none where it loads what it compiled at an
    earlier start: so a second start would compile once more what a first one did. A folder that the user names stays.
    """
    named, folder = os.environ.get(_TRITON_CACHE), _OF_USER or _own_cache()
    if folder is None:
        yield
        return
    os.environ[_TRITON_CACHE] = folder
    try:
        yield
    finally:
        if named is None:
            del os.environ[_TRITON_CACHE]
        else:
            os.environ[_TRITON_CACHE] = named


def record_graph(run: Callable[[], None], pool: Any, vllm_config: Any) -> torch.cuda.CUDAGraph:
    """Record `run` on the current stream, which is not the default one.

    It is called once before: kernels that compile or tune themselves may not do so meanwhile. `torch.cuda.graph` would
    give the allocator's memory back to the device around each of some hundred recordings.

    Args:
        run: what the graph holds.
        pool: memory of the graph, where vLLM has no pool of all graphs that a sleep offloads.
        vllm_config: says whether vLLM has one.

    Raises:
        RecordingFailed: `run` or its capture failed, here or on another rank of tensor parallelism.
    """
    _together(run)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    _together(lambda: _capture(graph, run, pool, vllm_config))
    return graph


def _capture(graph: torch.cuda.CUDAGraph, run: Callable[[], None], pool: Any, vllm_config: Any) -> None:
    failure: Exception | None = None
    # It also names the pool to collectives in symmetric memory, which leave it for a while.
    with capture_pool(pool, vllm_config) as pool:
        try:
            graph.capture_begin(pool=pool)
            try:
                run()
            except Exception as error:
                failure = error
            graph.capture_end()
        except RuntimeError as error:
            leave_capture(pool, broken=not _GRAPH_RELEASES_POOL)
            raise failure or error from None
        else:
            if failure is not None:
                raise failure
        finally:
            # It holds this frame, and what the failed run had made.
            del failure


def leave_capture(pool: Any, *, broken: bool | None) -> None:
    """Have torch leave a capture that CUDA has ended because of a failure.

    `capture_end` then raises before it has told the allocator and the random generators. The one goes on taking memory
    of `pool`, the others go on refusing to draw. No graph can have this pool any more: torch has no way to tell the
    allocator of pinned memory.
    """
    device = torch.accelerator.current_device_index()
    # Both raise where torch was built without CUDA; the first one also where the allocator has left the pool by itself,
    # as that of torch 2.13 does. A pool that other graphs have must not be let go of once too often: where nobody knows
    # whether a capture broke, its memory may stay.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        broken = True
    if broken:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(device, pool)
    # The generators leave a capture only when one ends well.
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin()
    torch.empty(1, device=torch.accelerator.current_accelerator()).zero_()
    empty.capture_end()


def _together(work: Callable[[], None]) -> None:
    """Do `work`, and fail where any rank of tensor parallelism fails."""
    try:
        work()
    except Exception as failure:
        all_ranks(False)
        logger.debug("recording failed", exc_info=True)
        said = in_a_line(failure)
    else:
        if all_ranks(True):
            return
        said = "it failed on another rank"
    # Not from the failure: its frames hold the memory that is to be given back. No context manager either, whose frame
    # would be one of them.
    raise RecordingFailed(said)


def settle_all_reduce() -> None:
    """Have vLLM's custom all-reduce exchange now what was recorded, within vLLM's `graph_capture`.

    Each of its kernels that is recorded leaves the address of its input behind. When the context ends, the ranks
    exchange these in the order of recording, and only then may a graph be replayed. The exchange would end the start
    where memory is gone by then; where a rank had failed first, and so has fewer, graphs would read inputs of others.
    So this comes before a replay and before graphs go. All ranks of tensor parallelism have to call it together.
    """
    custom = _custom_all_reduce()
    if custom is None or custom.disabled:
        return
    _, offsets = _custom_ops.get_graph_buffer_ipc_meta(custom._ptr)
    most = _over_ranks(len(offsets), torch.distributed.ReduceOp.MAX)
    lacking = most - len(offsets)
    if lacking:
        # It reads 16 bytes at a time.
        nothing = torch.zeros(4, dtype=torch.float32, device=custom.device)
        out = torch.empty_like(nothing)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(lacking):
            custom.all_reduce(nothing, out=out, registered=True)
        graph.capture_end()
    if most:
        custom.register_graph_buffers()


@contextmanager
def exchanged_later() -> Iterator[None]:
    """Leave the exchange of custom all-reduce to the `graph_capture` around this, of another one in here.

    vLLM exchanges at the end of that context also where a rank has failed, and so has recorded less than others.
    """
    custom = _custom_all_reduce()
    if custom is None:
        yield
        return
    # Also within another one.
    before = {name: value for name, value in vars(custom).items() if name in ("_IS_CAPTURING", _EXCHANGE)}
    setattr(custom, _EXCHANGE, lambda: None)
    try:
        yield
    finally:
        delattr(custom, _EXCHANGE)
        vars(custom).update(before)


def agreed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises where a rank of tensor parallelism has failed since the last call.

    Raises:
        RecordingFailed: it failed on another rank, as every rank knows.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        if not all_ranks(True):
            raise RecordingFailed("it failed on another rank")
        return function(*arguments, **settings)

    return call


def _custom_all_reduce() -> Any:
    """vLLM's `CustomAllreduce` of tensor parallelism, or None."""
    return getattr(get_tp_group().device_communicator, "ca_comm", None) if _tensor_parallel() else None


def all_ranks(agreed: bool) -> bool:
    """Whether all ranks of tensor parallelism say so, which wait for each other."""
    return bool(_over_ranks(agreed, torch.distributed.ReduceOp.MIN))


def _over_ranks(value: int, op: Any) -> int:
    """What `op` makes of every rank's value."""
    if not _tensor_parallel():
        return value
    found = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(found, op=op, group=get_tp_group().cpu_group)
    return int(found.item())


def _tensor_parallel() -> bool:
    return bool(model_parallel_is_initialized() and get_tp_group().world_size > 1)
