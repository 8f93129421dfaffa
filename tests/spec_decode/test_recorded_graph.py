# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a captured graph behaves as one, and the arithmetic of drafters' steps as vLLM's kernel."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.forward_context import BatchDescriptor, set_forward_context  # noqa: E402

from .drafters import make_config, plain_eagle_step  # noqa: E402
from .recorded_graph import RecordedGraphs  # noqa: E402

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE


class Held:
    """Something to capture: reads a buffer, a Python number and its input."""

    def __init__(self):
        self.buffer, self.number = torch.tensor([1, 2]), 10

    def __call__(self, x):
        return self.buffer * self.number + x


def launch(graphs, mode=FULL, **kwargs):
    with set_forward_context(
        None, make_config([1]), 1, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(1)
    ):
        return graphs(**kwargs)


@pytest.fixture
def held(make):
    held = Held()
    graphs = RecordedGraphs(held, None, FULL)
    x = torch.zeros(2, dtype=torch.int64)
    launch(graphs, x=x)
    return held, graphs, x


def test_stand_in_reads_what_was_written_in_place(held):
    held, graphs, x = held
    held.buffer.copy_(torch.tensor([3, 4]))
    x.fill_(5)
    assert launch(graphs, x=x).tolist() == [35, 45]


def test_stand_in_keeps_the_old_buffer_and_number(held):
    held, graphs, x = held
    held.buffer, held.number = torch.tensor([3, 4]), 100
    assert launch(graphs, x=x).tolist() == [10, 20]
    assert launch(graphs, mode=NONE, x=x).tolist() == [300, 400]


def test_stand_in_refuses_a_moved_input_and_a_late_capture(held):
    _, graphs, x = held
    with pytest.raises(AssertionError, match="input 'x' of"):
        launch(graphs, x=x.clone())
    RecordedGraphs.sealed = True
    graphs.clear_graphs()
    with pytest.raises(AssertionError, match="captured at request time"):
        launch(graphs, x=x)


def test_stand_in_refuses_to_wait_for_the_device(make):
    graphs = RecordedGraphs(lambda x: x * int(x[0]), None, FULL)
    with pytest.raises(AssertionError, match="waits for the device"):
        launch(graphs, x=torch.ones(2))


def test_stand_in_pool_is_overwritten_by_the_next_replay(held):
    _, graphs, x = held
    first = launch(graphs, x=x)
    other = RecordedGraphs(lambda x: x + 1, None, FULL)
    other.graph_pool = graphs.graph_pool
    launch(other, x=x)
    assert first.tolist() == [10, 20]
    launch(other, x=x)
    assert first.tolist() != [10, 20]


def test_step_arithmetic_is_that_of_vllms_cpu_kernel():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs a vLLM built for CPU")
    current_platform.import_kernels()
    kernel = getattr(torch.ops._C, "eagle_step_slot_mapping_metadata_kernel_impl", None)
    if kernel is None:
        pytest.skip("this vLLM has no CPU kernel for the step")
    results = []
    for ours in (True, False):
        positions, seq_lens = torch.tensor([3, 62, 63]), torch.tensor([4, 63, 64], dtype=torch.int32)
        table = torch.arange(48, dtype=torch.int32).view(3, 16)
        slots = torch.zeros(5 if ours else 3, dtype=torch.int64)
        if ours:
            plain_eagle_step(positions, table, seq_lens, 4, 64, positions, slots, 5)
            assert slots[3:].tolist() == [-1, -1]
        else:
            kernel(positions, table, seq_lens, positions, slots, 4, 64, -1)
        results.append((positions.tolist(), seq_lens.tolist(), slots[:3].tolist()))
    assert results[0] == results[1]
