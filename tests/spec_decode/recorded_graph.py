"""A stand-in for vLLM's `CUDAGraphWrapper` that behaves as a captured graph does, on any device.

At capture it writes down every tensor operation with the tensors themselves. A replay repeats those operations on those
same tensors; no Python of the model runs again. So a buffer that was re-assigned instead of written in place gives the
old buffer's contents, and a Python number keeps the value that it had at capture, as on a GPU. Tensors that a graph
made live in a memory pool: a replay of any graph of the pool overwrites what the others returned.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.forward_context import get_forward_context

_POISON = -77
_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func._schema.name not in _HOST_READS, f"{func} waits for the device inside a capture"
        result = func(*args, **kwargs)
        inputs = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = [tensor for tensor in _tensors(result) if _storage(tensor) not in inputs]
        if made or func._schema.is_mutable:
            self.operations.append((func, args, kwargs, made))
        return result


class Graph:
    def __init__(self, function, kwargs) -> None:
        self.addresses = {name: value.data_ptr() for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        recording = Recording()
        with recording:
            self.output = function(**kwargs)
        self.operations = recording.operations

    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            result = func(*args, **kwargs)
            if made:
                for target, value in zip(made, _tensors(result), strict=True):
                    target.copy_(value)

    def overwrite(self) -> None:
        for *_, made in self.operations:
            for tensor in made:
                tensor.fill_(_POISON)


class RecordedGraphs:
    """Takes the place of `CUDAGraphWrapper`. `sealed` says that the server has booted: no capture may follow."""

    instances: ClassVar[list[RecordedGraphs]] = []
    sealed: ClassVar[bool] = False

    def __init__(self, runnable, vllm_config, runtime_mode, cudagraph_options=None) -> None:
        self.runnable, self.runtime_mode = runnable, runtime_mode
        self.graph_pool: Any = None
        self.concrete_cudagraph_entries: dict[Any, Graph] = {}
        self.captured: list[Any] = []
        self.replayed: list[Any] = []
        self.without_graph = 0
        RecordedGraphs.instances.append(self)

    def clear_graphs(self) -> None:
        self.concrete_cudagraph_entries.clear()

    def __call__(self, **kwargs):
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            self.without_graph += 1
            return self.runnable(**kwargs)
        key = context.batch_descriptor
        graph = self.concrete_cudagraph_entries.get(key)
        if graph is None:
            assert not RecordedGraphs.sealed, f"{key} is captured at request time"
            graph = self.concrete_cudagraph_entries[key] = Graph(self.runnable, kwargs)
            self.captured.append(key)
            return graph.output
        for name, address in graph.addresses.items():
            assert kwargs[name].data_ptr() == address, f"input '{name}' of {key} moved"
        for other in RecordedGraphs.instances:
            if other.graph_pool is self.graph_pool:
                for one in other.concrete_cudagraph_entries.values():
                    one.overwrite()
        graph.replay()
        self.replayed.append(key)
        return graph.output
