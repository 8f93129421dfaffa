# SPDX-License-Identifier: Apache-2.0
"""A capture that writes down every tensor operation with the tensors themselves, on any device.

A replay repeats these operations on the same tensors, and no Python of the model runs again. So a buffer that was
assigned instead of written in place has the old contents, and a Python number keeps the value that it had at capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
