# SPDX-License-Identifier: Apache-2.0
"""What a recording tells vLLM. Graphs themselves are recorded on the simulated device and on GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.distributed.device_communicators import pynccl_allocator as allocator

from vllm_hwplugin.spec_decode.graph_recording import record_graph


class Graph:
    """`torch.cuda.CUDAGraph` of a host without a GPU."""

    pool: object = None

    def capture_begin(self, pool: object) -> None:
        Graph.pool = pool

    def capture_end(self) -> None:
        Graph.pool = None


def test_collectives_in_symmetric_memory_find_the_pool_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end its allocations and begin them again: those of another pool would be an error, or lie in it."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(allocator, "_graph_pool_id", "of the target's graphs")
    seen: list[tuple[object, object]] = []
    pool = (0, 7)
    record_graph(lambda: seen.append((Graph.pool, allocator._graph_pool_id)), pool)
    assert seen[1] == (pool, pool)
