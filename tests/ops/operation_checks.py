# SPDX-License-Identifier: Apache-2.0
"""What the tests of several operations ask: how does vLLM call its own, what does a schema say, does a refused call
leave its tensors alone, what does torch.compile make of a caller, and what does a graph replay."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch


def arguments_of_vllms_call(custom_ops: str, operation: str) -> list[str]:
    """The positional arguments, as they are written, of the one call of `torch.ops._C.<operation>` in the text of a
    version's vllm/_custom_ops.py. Raises ValueError where it has none or several."""
    (arguments,) = (
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(ast.parse(custom_ops))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"torch.ops._C.{operation}"
    )
    return arguments


def signature(schema: Any) -> list[tuple[str, str, bool]]:
    """Of every argument of a schema its name, its type and whether it is written to."""
    return [(argument.name, str(argument.type), argument.is_write) for argument in schema.arguments]


def assert_refused(operation: Callable[..., None], arguments: Mapping[str, Any], words: str) -> None:
    """The call raises a RuntimeError in which the regular expression `words` is found, and no tensor has changed."""
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(RuntimeError, match=words):
        operation(**arguments)
    # As float64, which holds every value of the other types, those of 8 bits among them.
    changed = [name for name, was in before.items() if not torch.equal(arguments[name].double(), was.double())]
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
