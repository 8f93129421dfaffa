# SPDX-License-Identifier: Apache-2.0
"""What the tests of several operations ask: does a refused call leave its tensors alone, what
does torch.compile make of a caller, what does a graph replay, and how far are two results apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_refused(operation: Callable[..., None], arguments: Mapping[str, Any], words: str) -> None:
    """The call raises a RuntimeError in which the regular expression `words` is found, and no tensor has changed."""
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(RuntimeError, match=words):
        operation(**arguments)
    changed = [name for name, was in before.items() if not same_bits(arguments[name], was)]
    assert not changed, f"changed by a call that was refused: {changed}"


def replay_of(run: Callable[[], object], device: str) -> Callable[[], None]:
    """Runs it once, captures it on a device, ``cuda`` or ``musa``, and gives the graph's replay."""
    module = torch.get_device_module(device)
    run()
    # CUDAGraph, or torch_musa's MUSAGraph.
    graph = getattr(module, f"{device.upper()}Graph")()
    with module.graph(graph):
        run()
    return graph.replay  # type: ignore[no-any-return]


def compiled_result(caller: Callable[..., Any], *inputs: Any) -> tuple[Any, list[str]]:
    """What the caller returns when torch.compile has traced it into one graph, which then runs as it is, and the names
    of the functions that the graph calls."""
    called: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    return torch.compile(caller, backend=backend, fullgraph=True)(*inputs), called


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(_bits(found), _bits(expected))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def steps(quantised: torch.Tensor) -> torch.Tensor:
    """Numbers of an 8-bit type in order, so that a difference counts the numbers between."""
    bits = quantised.view(torch.int8).int()
    if quantised.dtype == torch.int8:
        return bits
    return torch.where(bits < 0, -(bits & 0x7F), bits)
