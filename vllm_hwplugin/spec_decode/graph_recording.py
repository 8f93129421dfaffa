# SPDX-License-Identifier: Apache-2.0
"""Capture vLLM's own methods into CUDA graphs, and go on without them if that fails.

No list of what cannot be captured is complete: a model may wait for the device in its `compute_logits`, and memory may
run out. So each feature captures inside `attempt`, and a start goes on without the graphs that failed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, Generic, TypeVar

import torch
from packaging.version import Version
from vllm import _custom_ops, envs
from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
from vllm.distributed.parallel_state import get_tp_group, graph_capture
from vllm.v1.sample.ops import topk_topp_triton

from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.fallback import FeatureRequired, gives_up, in_a_line, report_unused
from vllm_hwplugin.spec_decode.ranks import Beyond, all_ranks, over_ranks, tensor_parallel

try:
    from vllm.compilation.cudagraph_pool import capture_pool
except ImportError:
    # Up to 0.31 there is only the caller's pool.
    @contextmanager
    def capture_pool(pool: Any, vllm_config: Any) -> Iterator[Any]:
        set_graph_pool_id(pool)
        yield pool


logger = logging.getLogger("vllm.hwplugin")

_TRITON_CACHE: Final = "TRITON_CACHE_DIR"
#: The user's folder; vLLM names a folder later, while it compiles.
_OF_USER: Final = os.environ.get(_TRITON_CACHE)

#: The method of vLLM's `CustomAllreduce` by which ranks exchange addresses of captured inputs.
_EXCHANGE: Final = "register_graph_buffers"
#: Whether a `torch.cuda.CUDAGraph` whose `capture_end` failed releases its pool when it is destroyed. If it does, a
#: second release ends the process: the destructor throws.
_GRAPH_RELEASES_POOL: Final = Version(torch.__version__).release >= (2, 14)


class RecordingFailed(HwpluginError, RuntimeError):
    """A capture failed on a rank, and every rank knows."""


def known_arguments(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that `function` takes in this vLLM."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


def reserved_memory() -> int:
    """Return the bytes that this process's allocator holds and cannot give back.

    They include neither other processes nor CUDA's own memory for a graph.
    """
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.memory_reserved())


def shared_scratch() -> list[torch.Tensor]:
    """Return the buffers in which vLLM's top-k and top-p kernels work.

    vLLM frees a buffer and allocates a larger one when the batch grows. A graph of such kernels keeps using the memory
    of its capture, so the owner of the graph must also keep that memory.
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
    beyond: Beyond = Beyond.NONE,
) -> bool:
    """Capture a feature's graphs, or forget them; return whether all were captured.

    With tensor parallelism a failure on one rank is a failure on all, so all ranks must call this in one order. A rank
    that fails between kernels that talk to other ranks leaves these waiting on the device: nothing can help them.

    Args:
        effect: what happens without the graphs, as for `report_unused`.
        pool: the pool of graphs that vLLM's wrapper captures; None if `record_graph` captures.
        kernels: a context for `record`; by default `kept_kernels`.
        beyond: as for `all_ranks`.

    Raises:
        FeatureRequired: something failed, and the feature's switch is `on`.
    """
    try:
        with (kernels or kept_kernels)():
            record()
        if all_ranks(True, beyond):
            return True
        reason = "it failed on another rank"
    except FeatureRequired:
        raise
    except RecordingFailed as failure:
        reason = str(failure)
    except Exception as failure:
        all_ranks(False, beyond)
        reason = in_a_line(failure)
        logger.debug("%s: capture failed", feature, exc_info=True)
        if pool is not None:
            leave_capture(pool, broken=None)
    settle_all_reduce()
    forget()
    # A failure may be in a cycle with its frames, and these hold what the failed run had made.
    gc.collect()
    # Waits for what still uses the memory, and gives it back.
    reserved_memory()
    report_unused(feature, effect, f"capturing graphs failed: {reason}", level=logging.WARNING)
    return False


_C = TypeVar("_C")
_G = TypeVar("_G", bound="Graphs[Any]")


class Graphs(Generic[_C]):
    """The graphs of a feature for a runner or a drafter, which are captured, forgotten and given up together.

    Companions are graphs of other features that build on these. They are captured after them, and go with them.

    Attributes:
        effect: what happens without the graphs, as for `report_unused`.
        needed: why companions have no graphs without these, with `{reason}`.
        failed: whether the last capture failed.
    """

    feature: str
    effect: str
    needed = "{reason}"
    failed = False

    def __init__(self, owner: Any):
        self._owner = owner
        self._companions: list[Any] = []
        self.forget()

    def add(self, make: Callable[[Any, Any], _G]) -> _G:
        """Make companions for the same owner, and return them."""
        companion = make(self._owner, self)
        self._companions.append(companion)
        return companion

    def forget(self) -> None:
        """Drop the graphs and everything made for them, also the companions'."""
        self.captured: _C | None = None
        for companion in self._companions:
            companion.forget()

    def attempt(self, record: Callable[[], object], pool: Any = None, beyond: Beyond = Beyond.NONE) -> bool:
        """Run `record` as the function `attempt` does; without graphs, leave out companions."""
        self.failed = not attempt(self.feature, self.effect, record, self.forget, pool, beyond=beyond)
        if self.failed:
            self._leave_companions("capturing these failed")
        return not self.failed

    def stay_stock(self, reason: str) -> None:
        """Drop the graphs, and record why neither these nor companions exist.

        Raises:
            FeatureRequired: the switch is `on`.
        """
        self.forget()
        report_unused(self.feature, self.effect, reason)
        self._leave_companions(reason)

    def _leave_companions(self, reason: str) -> None:
        for companion in self._companions:
            companion.stay_stock(self.needed.format(reason=reason))

    def give_up(self, reason: str) -> None:
        """Drop the graphs of a running engine, and record why."""
        if self.captured is not None:
            for companion in self._companions:
                companion.give_up(reason)
            self.forget()
            gives_up(self.feature, self.effect, reason)


def attempt_capture(
    feature: str, effect: str, capture: Callable[[], object], managers: Sequence[Any], device: torch.device
) -> bool:
    """Have vLLM's managers capture a feature's graphs, or clear them; return success.

    Args:
        managers: every `CudaGraphManager` that `capture` fills.

    Raises:
        FeatureRequired: something failed, and the feature's switch is `on`.
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
    """Return a writable folder in vLLM's cache, or None."""
    folder = os.path.join(envs.VLLM_CACHE_ROOT, "vllm_hwplugin", "triton")
    if not os.path.isdir(envs.VLLM_CACHE_ROOT):
        return None
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Keep Triton's kernels in vLLM's own cache, where each start finds them.

    While vLLM compiles a model it names a folder of that model for them, and no folder if it loads what it compiled at
    an earlier start: so a second start would compile again what a first start did. A folder that the user names stays.
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


def record_graph(
    run: Callable[[], object], pool: Any, vllm_config: Any, beyond: Beyond = Beyond.NONE
) -> torch.cuda.CUDAGraph:
    """Capture `run` on the current stream, which is not the default stream.

    `run` is called once before: kernels must not compile or tune themselves during a capture. `torch.cuda.graph` would
    give the allocator's memory back to the device around each of some hundred captures. `pool` is used if `vllm_config`
    says that vLLM has no pool of all graphs that a sleep offloads. `beyond` is as for `all_ranks`.

    Raises:
        RecordingFailed: `run` or its capture failed, here or on another rank.
    """
    _together(run, beyond)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    _together(lambda: _capture(graph, run, pool, vllm_config), beyond)
    return graph


def _capture(graph: torch.cuda.CUDAGraph, run: Callable[[], object], pool: Any, vllm_config: Any) -> None:
    failure: Exception | None = None
    # It also names the pool to collectives in symmetric memory, which leave the pool for a while.
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
            # The exception holds this frame, and what the failed run had made.
            del failure


def leave_capture(pool: Any, *, broken: bool | None) -> None:
    """Make torch leave a capture that CUDA ended after a failure.

    `capture_end` then raises before it has told the allocator and the random generators. The allocator goes on taking
    memory of `pool`, the generators go on refusing to draw. No graph can have this pool again: torch has no way to tell
    the allocator of pinned memory. `broken` is None if nobody knows whether a capture broke.
    """
    device = torch.accelerator.current_device_index()
    # Both raise if torch was built without CUDA; the first also if the allocator has left the pool by itself, as in
    # torch 2.13. A pool that other graphs have must not be released once too often: if nobody knows whether a capture
    # broke, its memory may stay.
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


def _together(work: Callable[[], object], beyond: Beyond) -> None:
    """Do `work`, and fail if any rank fails."""
    try:
        work()
    except Exception as failure:
        all_ranks(False, beyond)
        logger.debug("capture failed", exc_info=True)
        reason = in_a_line(failure)
    else:
        if all_ranks(True, beyond):
            return
        reason = "it failed on another rank"
    # Not from the failure: its frames hold the memory that is to be given back. No context manager either: its frame
    # would be one of them.
    raise RecordingFailed(reason)


def settle_all_reduce() -> None:
    """Make vLLM's custom all-reduce exchange captured addresses, inside `graph_capture`.

    Each captured kernel leaves the address of its input behind. When the context ends, the ranks exchange these in the
    order of capture, and only then may a graph be replayed. The exchange would end the start if that memory is gone by
    then; if a rank had failed first, and so has fewer, graphs would read inputs of other kernels. So call this before a
    replay and before graphs are dropped. All ranks of tensor parallelism must call it together.
    """
    custom = _custom_all_reduce()
    if custom is None or custom.disabled:
        return
    _, offsets = _custom_ops.get_graph_buffer_ipc_meta(custom._ptr)
    most = over_ranks(len(offsets), torch.distributed.ReduceOp.MAX)
    lacking = most - len(offsets)
    if lacking:
        # The kernel reads 16 bytes at a time.
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
    """Leave custom all-reduce's exchange to the outer of two nested `graph_capture`.

    vLLM exchanges at the end of the inner context even if a rank has failed, and so has captured less than other ranks.
    """
    custom = _custom_all_reduce()
    if custom is None:
        yield
        return
    # This context may itself be nested.
    before = {name: value for name, value in vars(custom).items() if name in ("_IS_CAPTURING", _EXCHANGE)}
    setattr(custom, _EXCHANGE, lambda: None)
    try:
        yield
    finally:
        delattr(custom, _EXCHANGE)
        vars(custom).update(before)


def agreed(function: Callable[..., Any], beyond: Beyond) -> Callable[..., Any]:
    """Wrap `function` to raise if a rank failed since the last call.

    `beyond` is as for `all_ranks`.

    Raises:
        RecordingFailed: it failed on another rank, as every rank knows.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        if not all_ranks(True, beyond):
            raise RecordingFailed("it failed on another rank")
        return function(*arguments, **settings)

    return call


def _custom_all_reduce() -> Any:
    """Return vLLM's `CustomAllreduce` of tensor parallelism, or None."""
    return getattr(get_tp_group().device_communicator, "ca_comm", None) if tensor_parallel() else None
