# SPDX-License-Identifier: Apache-2.0
"""What a recording tells vLLM, and what a failed one leaves behind. Graphs themselves are recorded on the simulated
device and on GPUs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from triton.runtime.cache import FileCacheManager
from vllm import envs
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import pynccl_allocator as allocator
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from tests.cpu_seconds import patience
from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.features import V2_TAIL_GRAPH, gate_of
from vllm_hwplugin.spec_decode import graph_recording, obstacles, ranks
from vllm_hwplugin.spec_decode.graph_recording import attempt, attempt_capture, exchanged_later, record_graph

POOL = (0, 7)
TAIL = obstacles.Part.V2_SAMPLING
CONFIG = SimpleNamespace(use_cumem_cudagraph_pool=False)
CACHE = "TRITON_CACHE_DIR"


class Graph:
    """`torch.cuda.CUDAGraph` of a host without a GPU. Like CUDA, it ends a capture in which something was forbidden
    with an error of its own.
    """

    under_way: Any = None
    broken = False

    def capture_begin(self, pool: object = None) -> None:
        assert Graph.under_way is None
        Graph.under_way, Graph.broken = pool or "one of its own", False

    def capture_end(self) -> None:
        Graph.under_way = None
        if Graph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture(autouse=True)
def _device(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    yield
    Graph.under_way = None


@pytest.mark.parametrize("compiles", [True, False], ids=["vLLM compiles", "vLLM loads what it compiled"])
@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_kept_where_the_next_start_finds_them(
    compiles: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    monkeypatch.setattr(graph_recording, "report_unused", lambda *_, **__: None)
    monkeypatch.setattr(graph_recording, "_OF_USER", None)
    monkeypatch.delenv(CACHE, raising=False)
    if compiles:
        monkeypatch.setenv(CACHE, "of the model")
    found: list[str] = []

    def record() -> None:
        found.append(FileCacheManager("a-kernel").cache_dir)
        if fails:
            raise RuntimeError

    assert attempt(V2_TAIL_GRAPH, "", record, lambda: None) is not fails
    assert found == [str(tmp_path / "vllm_hwplugin" / "triton" / "a-kernel")]
    assert os.environ.get(CACHE) == ("of the model" if compiles else None)


def test_that_is_in_a_folder_of_the_user_if_one_is_named_and_vllms_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, "of the model")
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path / "missing"), raising=False)
    for of_user, expected in (("of the user", "of the user"), (None, "of the model")):
        monkeypatch.setattr(graph_recording, "_OF_USER", of_user)
        with graph_recording.kept_kernels():
            assert os.environ[CACHE] == expected
        assert os.environ[CACHE] == "of the model"


def test_collectives_in_symmetric_memory_find_the_pool_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end its allocations and begin them again: those of another pool would be an error, or lie in it."""
    monkeypatch.setattr(allocator, "_graph_pool_id", "of the target's graphs")
    seen: list[tuple[object, object]] = []
    record_graph(lambda: seen.append((Graph.under_way, allocator._graph_pool_id)), POOL, CONFIG)
    assert seen[1] == (POOL, POOL)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("profiles", [False, True])
def test_graphs_are_in_the_pool_that_a_sleep_offloads_wherever_vllms_are(
    offloads: bool, profiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = pytest.importorskip("vllm.compilation.cudagraph_pool", reason="this vLLM has none")
    of_sleep = SimpleNamespace(cudagraph_pool=lambda: nullcontext("of sleep"))
    monkeypatch.setattr(pools, "get_mem_allocator_instance", lambda: of_sleep)
    seen: list[object] = []

    def run() -> None:
        seen.extend((Graph.under_way, allocator._graph_pool_id) if Graph.under_way is not None else ())

    with pools.capture_outside_cumem_pool() if profiles else nullcontext():
        record_graph(run, POOL, SimpleNamespace(use_cumem_cudagraph_pool=offloads))
    assert seen == ["of sleep" if offloads and not profiles else POOL] * 2


def waits_for_the_device() -> None:
    if Graph.under_way is not None:
        Graph.broken = True
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def spoils_the_capture() -> None:
    Graph.broken = Graph.under_way is not None


def is_out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


def is_out_of_memory_while_captured() -> None:
    if Graph.under_way is not None:
        is_out_of_memory()


def records_well() -> None:
    record_graph(lambda: None, POOL, CONFIG)


@pytest.mark.parametrize(
    "run", [waits_for_the_device, spoils_the_capture, is_out_of_memory, is_out_of_memory_while_captured]
)
def test_a_recording_that_fails_leaves_vllm_as_it_is(
    run: Any, uses: dict[str, tuple[bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def runs() -> None:
        held = torch.ones(1)
        made.append(weakref.ref(held))
        run()

    def forgets() -> None:
        # The memory is given back behind it, and vLLM lets nobody collect garbage while it captures.
        forgotten.append(Graph.under_way is None and all(one() is None for one in made))

    forgotten: list[bool] = []
    recording: list[Any] = [lambda: record_graph(runs, POOL, CONFIG), forgets]
    gc.disable()
    try:
        assert not attempt(V2_TAIL_GRAPH, "stock", *recording)
    finally:
        gc.enable()
    assert forgotten == [True]
    used, reason = uses[V2_TAIL_GRAPH]
    assert not used
    assert "\n" not in reason
    # The next one is no longer within the broken capture.
    assert attempt(V2_TAIL_GRAPH, "stock", records_well, lambda: None)
    monkeypatch.setenv(gate_of(V2_TAIL_GRAPH), "on")
    with pytest.raises(FeatureRequired):
        attempt(V2_TAIL_GRAPH, "stock", *recording)


@pytest.mark.parametrize(("recorded", "let_go"), [("by us", 1), ("by vLLM's wrapper", 0)])
def test_a_pool_is_let_go_of_only_by_a_capture_that_broke(
    recorded: str, let_go: int, uses: dict[str, tuple[bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other graphs may have it. This allocator leaves the pool by itself, as that of torch 2.13."""
    released: list[object] = []

    def is_not_recording(*_: object) -> None:
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", is_not_recording)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: released.append(pool))
    # The wrapper fails in the run before its capture.
    record: Any = is_out_of_memory if let_go == 0 else lambda: record_graph(spoils_the_capture, POOL, CONFIG)
    assert not attempt(V2_TAIL_GRAPH, "stock", record, lambda: None, pool=POOL)
    assert released == [POOL] * let_go


def test_managers_whose_capture_fails_have_no_graphs(
    uses: dict[str, tuple[bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_recording, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    manager = SimpleNamespace(graphs={"a shape": "its graph"}, _graphs_captured=True, pool=POOL)
    assert not attempt_capture(V2_TAIL_GRAPH, "stock", is_out_of_memory, [manager], torch.device("cpu"))
    assert vars(manager) == {"graphs": {}, "_graphs_captured": False, "pool": "another"}


class AllReduce:
    """vLLM's `CustomAllreduce`: what is recorded of it stands in line until the ranks exchange it, one by one."""

    disabled, device, _ptr = False, torch.device("cpu"), 0

    def __init__(self) -> None:
        self.in_line: list[torch.Tensor] = []
        self.exchanged: list[float] = []

    def all_reduce(self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False) -> None:
        if Graph.under_way is not None:
            self.in_line.append(inp)

    def register_graph_buffers(self) -> None:
        counts: list[Any] = [None, None]
        torch.distributed.all_gather_object(counts, len(self.in_line))
        assert counts[0] == counts[1]
        self.exchanged += [float(one[0]) for one in self.in_line]
        self.in_line.clear()


def _rank(rank: int, folder: str, fails: str, results: Any) -> None:
    """One of two ranks; the second one fails: in a row of obstacles, or before or while it is captured."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    custom = AllReduce()
    parallel_state._TP = SimpleNamespace(
        world_size=2, cpu_group=torch.distributed.group.WORLD, device_communicator=SimpleNamespace(ca_comm=custom)
    )
    ranks.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    graph_recording._custom_ops.get_graph_buffer_ipc_meta = lambda _: ([], [0] * len(custom.in_line))

    def here(place: str) -> None:
        if rank == 1 and fails == place:
            raise RuntimeError(f"it fails {place}")

    def recorded(label: float) -> Any:
        return lambda: record_graph(lambda: custom.all_reduce(torch.full((4,), label), registered=True), POOL, CONFIG)

    def run() -> None:
        custom.all_reduce(torch.full((4,), 2.0), registered=True)
        here("while it is captured" if Graph.under_way else "before it is captured")
        custom.all_reduce(torch.full((4,), 2.0), registered=True)

    def recording() -> None:
        for _ in range(2):
            record_graph(run, POOL, CONFIG)

    runner = SimpleNamespace(speculative_config=object(), speculator=object())
    obstacles.OBSTACLES = (obstacles.Obstacle("a row is true", TAIL, lambda _: here("in a row")),)
    recorded(1.0)()  # vLLM's own
    reason = obstacles.why_not(runner, TAIL)
    assert (reason is None) == (fails != "in a row")
    assert (obstacles.why_not(runner, TAIL, together=False) is None) == (reason is None or rank == 0)
    first = reason is None and attempt(V2_TAIL_GRAPH, "stock", recording, lambda: None)
    # Whatever came of that one, the ranks are of one mind about the next.
    second = attempt(V2_TAIL_GRAPH, "stock", recorded(3.0), lambda: None)
    custom.register_graph_buffers()
    results.put((rank, first, second, custom.exchanged))


@pytest.mark.parametrize("fails", ["nowhere", "in a row", "before it is captured", "while it is captured"])
def test_ranks_of_tensor_parallelism_are_of_one_mind(fails: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), fails, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=patience(60)) for _ in ranks)
    for rank in ranks:
        rank.join(patience(60))
    good = fails == "nowhere"
    assert [(rank, first, second) for rank, first, second, _ in found] == [(0, good, True), (1, good, True)]
    inputs, others = (exchanged for *_, exchanged in found)
    # Of graphs that are there, each rank finds the input of the same kernel.
    pairs = [pair for pair in zip(inputs, others, strict=True) if set(pair) & {1.0, 3.0}]
    assert pairs == [(1.0, 1.0), (3.0, 3.0)]


def test_captures_within_captures_are_exchanged_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges: list[bool] = []

    class Custom:
        disabled, _IS_CAPTURING, capture = False, False, CustomAllreduce.capture

        def register_graph_buffers(self) -> None:
            exchanges.append(self._IS_CAPTURING)

    custom: Any = Custom()
    monkeypatch.setattr(graph_recording, "_custom_all_reduce", lambda: custom)
    with custom.capture():
        with exchanged_later(), custom.capture():
            with exchanged_later(), custom.capture():
                pass
            assert custom._IS_CAPTURING
        assert custom._IS_CAPTURING
        assert not exchanges
    assert exchanges == [False]
