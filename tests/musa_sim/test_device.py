# SPDX-License-Identifier: Apache-2.0
"""The simulated device does what a GPU does, and refuses what torch_musa and the driver refuse."""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from . import simulated
from .device_process import DeviceProcess, on_the_device

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.musa_sim

MB = 1 << 20


def captured(work: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    graph = torch.musa.MUSAGraph()
    with torch.musa.graph(graph, **options):
        result = work()
    return graph, result


# -- memory


@on_the_device
def test_a_device_has_no_more_memory_than_it_has() -> None:
    # vLLM names it in an `except` around loading.
    with pytest.raises(torch.musa.OutOfMemoryError):
        torch.empty(65 * MB, dtype=torch.uint8, device="musa")
    assert torch.musa.memory_allocated("musa:1") == 0
    other = torch.empty(40 * MB, dtype=torch.uint8, device="musa:1")
    assert torch.musa.memory_allocated("musa:1") == other.numel()
    assert torch.musa.get_device_properties(1).total_memory == 64 * MB


@on_the_device
def test_pinned_memory_has_an_address_on_the_device() -> None:
    from torch_musa._MUSAC import device as sim

    pinned = torch.zeros(2, 3).pin_memory()
    there = sim.mapped(pinned[1])
    before = torch.musa.memory_allocated()
    pinned.fill_(4)
    assert (there.is_musa, there.tolist()) == (True, [4] * 3)
    there.add_(1)
    assert pinned.tolist() == [[4] * 3, [5] * 3]
    # It is the host's memory, which the view keeps.
    assert torch.musa.memory_allocated() == before
    del pinned
    gc.collect()
    assert there.tolist() == [5] * 3
    with pytest.raises(RuntimeError, match="pinned"):
        sim.mapped(torch.zeros(3))


# -- operations


@on_the_device
def test_devices_do_not_mix() -> None:
    here, there = torch.ones(3, device="musa:0"), torch.ones(3, device="musa:1")
    for other in (there, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2] * 3
    assert here[torch.tensor([0])].tolist() == [1]
    with pytest.raises(RuntimeError, match="same device"):
        torch.index_select(here, 0, torch.tensor([0]))
    here.copy_(there + 1)
    assert here.tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="musa:2")


@on_the_device
def test_a_forked_child_has_no_device() -> None:
    torch.ones(1, device="musa")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="musa")
        except RuntimeError as error:
            os._exit(3 if "'spawn' start method" in str(error) else 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


# -- graphs


@on_the_device
def test_a_replay_takes_new_inputs_and_only_replays_write() -> None:
    inputs, counter = torch.ones(3, device="musa"), torch.zeros((), device="musa")

    def work() -> Any:
        counter.add_(1)
        return torch.cat([inputs * 2, inputs.new_full((1,), 5)])

    graph, result = captured(work)
    assert counter.item() == 0
    assert result.isnan().all()
    for value in (3, 4):
        inputs.fill_(value)
        graph.replay()
        assert result.tolist() == [2 * value] * 3 + [5]
    assert counter.item() == 2


@on_the_device
def test_a_graph_keeps_its_own_memory_and_no_other() -> None:
    inputs = torch.ones(3, device="musa")
    held = [inputs]
    del inputs
    graph, result = captured(lambda: (held[0] + 1).mul(2))
    gc.collect()
    graph.replay()
    assert result.tolist() == [4] * 3
    held.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()


@on_the_device
def test_a_graph_reads_what_the_host_writes_to_mapped_memory() -> None:
    from torch_musa._MUSAC import device as sim

    pinned = torch.ones(3).pin_memory()
    held = [sim.mapped(pinned)]
    graph, result = captured(lambda: held[0] * 2)
    pinned.fill_(6)
    graph.replay()
    assert result.tolist() == [12] * 3
    held.clear()
    graph.replay()
    del pinned
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()


WAITS = {
    "item": lambda x, pinned: x.sum().item(),
    "truth": lambda x, pinned: bool(x[0] > 0),
    "list": lambda x, pinned: x.tolist(),
    "to the host": lambda x, pinned: x.cpu(),
    "blocking copy": lambda x, pinned: pinned.copy_(x),
    "from the host": lambda x, pinned: x.copy_(torch.ones(3), non_blocking=True),
    "tensor of numbers": lambda x, pinned: torch.tensor([1.0, 2.0], device="musa"),
    "nonzero": lambda x, pinned: x.nonzero(),
    "mask": lambda x, pinned: x[x > 0],
    "index from the host": lambda x, pinned: x[torch.tensor([0])],
    "unique": lambda x, pinned: x.unique(),
    "equal": lambda x, pinned: torch.equal(x, x),
    "synchronize": lambda x, pinned: torch.musa.synchronize(),
    "stream": lambda x, pinned: torch.musa.current_stream().synchronize(),
    "event": lambda x, pinned: event_of(torch.musa.current_stream()).synchronize(),
    "query": lambda x, pinned: event_of(torch.musa.current_stream()).query(),
}


def event_of(stream: Any) -> Any:
    event = torch.musa.Event()
    event.record(stream)
    return event


@pytest.mark.parametrize("what", WAITS)
@on_the_device
def test_a_capture_does_not_wait(what: str) -> None:
    there, pinned = torch.ones(3, device="musa"), torch.ones(3).pin_memory()
    WAITS[what](there, pinned)
    graph = torch.musa.MUSAGraph()
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    # Swallowed, it still breaks the capture.
    with pytest.raises(RuntimeError, match="error during capture"), torch.musa.graph(graph), refused:
        WAITS[what](there, pinned)
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


@on_the_device
def test_an_operation_that_torch_musa_lacks_is_not_there() -> None:
    with pytest.raises(NotImplementedError, match="torch_musa has no such operation"):
        torch.special.modified_bessel_i0(torch.ones(2, device="musa"))


@on_the_device
def test_a_process_holds_so_many_graphs_and_no_more() -> None:
    held = []
    with mock.patch.dict(os.environ, MUSA_SIM_GRAPHS="20"):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            held.extend(captured(lambda: torch.ones(1, device="musa")) for _ in range(21))
        held.clear()
        captured(lambda: torch.ones(1, device="musa"))


@on_the_device
def test_another_stream_is_captured_once_it_has_waited() -> None:
    there, side = torch.zeros(2, device="musa"), torch.musa.Stream()

    def outside() -> None:
        with torch.musa.stream(side):
            there.add_(1)

    captured(outside)
    assert there.tolist() == [1, 1]

    def inside() -> None:
        side.wait_stream(torch.musa.current_stream())
        outside()

    def joined() -> None:
        inside()
        torch.musa.current_stream().wait_stream(side)

    graph, _ = captured(joined)
    assert there.tolist() == [1, 1]
    graph.replay()
    assert there.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(inside)


def test_what_stands_for_a_kernel_computes_the_same(musa_host: None, tmp_path: Path) -> None:
    # vLLM puts names into torch.musa, so no other test has this process.
    process = DeviceProcess(simulated.environment(tmp_path))
    compare_stand_ins(process)
    process.close()


@on_the_device
def compare_stand_ins() -> None:
    from triton_musa.interpreter import INSTEAD
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.v1.worker.gpu_worker  # noqa: F401

    for kernel in (write_keys, multiply_by_experts, update_delta_rule):
        torch.manual_seed(0)
        interpreted = kernel()
        torch.manual_seed(0)
        with mock.patch.dict(INSTEAD, clear=True):
            expected = kernel()
        assert expected.any()
        torch.testing.assert_close(interpreted, expected, atol=2e-3, rtol=2e-3)


#: At the limits of types, and between.
NUMBERS = (0, 1, 3, -1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, 0.5, -0.0, 1e-300, float("inf"), True)


@on_the_device
def test_shortened_operators_are_those_of_the_interpreter() -> None:
    import numpy
    from triton import language as tl
    from triton.runtime import interpreter

    from tests.interpreter import OPERATORS

    def made(dtype: Any, shape: tuple[int, ...]) -> Any:
        values = numpy.array([3, 0, 2**31 - 1, -5, 1, 7, -2, 4][-math.prod(shape) :]).reshape(shape or 1)
        handle = interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(dtype)), dtype)
        return tl.tensor(handle, tl.block_type(dtype, shape) if shape else dtype)

    def outcome(operator: Any, *operands: Any) -> Any:
        try:
            found = operator(*operands)
        except Exception as error:
            return type(error)
        values = found.handle.data
        return str(found.type), str(found.handle.dtype), values.dtype, values.shape, values.tobytes()

    types = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.pointer_type(tl.int32))
    operands = [made(dtype, shape) for dtype in types for shape in ((), (4,), (2, 4))]
    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name in OPERATORS:
            shortened = getattr(tl.tensor, name)
            for left in operands:
                for right in (*operands, *NUMBERS):
                    expected = outcome(shortened.__wrapped__, left, right)
                    assert outcome(shortened, left, right) == expected, (name, left.type, right)
        cast = interpreter.TritonSemantic.cast
        for value in operands:
            for dtype in types:
                found, expected = (
                    outcome(one, interpreter.interpreter_semantic, value, dtype) for one in (cast, cast.__wrapped__)
                )
                assert found == expected, (value.type, dtype)


def write_keys() -> Any:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    keys, values = torch.randn(2, 6, 3, 8).half().to("musa")
    slots = torch.tensor([7, -1, 0, 9, 4], device="musa")
    one = torch.ones((), device="musa")
    # Blocks of four tokens, of both, and a layer's part of what all layers have.
    caches = torch.zeros(3, 2, 4, 2, 3, 8, device="musa", dtype=torch.float16)[:, :, :, 0].unbind(1)
    triton_reshape_and_cache_flash(keys, values, *caches, slots, "auto", one, one)
    return torch.stack(caches).cpu()


def multiply_by_experts() -> Any:
    from triton import language
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel

    tokens, top_k, size, width = 5, 2, 4, 24
    given, weights, shares = (
        torch.randn(shape).half().to("musa") for shape in ((tokens, 20), (3, width, 20), (tokens, top_k))
    )
    # The second block is an expert's of another GPU, and the last one is not for any.
    chosen = torch.tensor([0, 3, 5, 10, 1, 8, 10, 10, 2, 4, 6, 7, 9, 10, 10, 10, 0, 1, 2, 3], dtype=torch.int32)
    experts = torch.tensor([1, -1, 0, 2, 2], dtype=torch.int32)
    products = torch.full((tokens, top_k, width), 7.0, device="musa", dtype=torch.float16)
    config = {"BLOCK_SIZE_M": size, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 1}
    padded = torch.tensor([16], dtype=torch.int32, device="musa")
    quantized = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )
    invoke_fused_moe_triton_kernel(
        given, weights, products, None, None, shares, chosen.to("musa"), experts.to("musa"), padded, True, top_k,
        config, language.float16, **quantized,
    )  # fmt: skip
    return products.cpu()


def update_delta_rule() -> Any:
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    heads, groups, size = 2, 2, 8
    starts = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32, device="musa")
    a, b = torch.randn(2, 5, heads * groups).half().to("musa")
    q, k = torch.randn(2, 1, 5, heads, size).half().to("musa")
    v = torch.randn(1, 5, heads * groups, size).half().to("musa")
    states = torch.randn(9, heads * groups, size, size).to("musa")
    # The third has no state, and the second no token.
    places = torch.tensor([[3, 4], [1, 2], [0, 0], [5, 6]], dtype=torch.int32, device="musa")
    accepted = torch.tensor([2, 1, 1, 1], dtype=torch.int32, device="musa")
    decays, bias = torch.randn(2, heads * groups).to("musa")
    found, _ = fused_sigmoid_gating_delta_rule_update(
        decays, a, b, bias, q, k, v, initial_state=states, cu_seqlens=starts, ssm_state_indices=places,
        num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    # What no request writes is not set.
    return torch.cat([found[0, [0, 1, 3, 4]].float().flatten(), states.flatten()]).cpu()


# -- names
