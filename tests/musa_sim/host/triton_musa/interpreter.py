# SPDX-License-Identifier: Apache-2.0
"""Launches on the simulated device: Triton's interpreter on the device's own memory, recorded in captures.

The interpreter's way with other devices is to copy each argument's whole storage to the host and back.
"""

import dataclasses
import inspect
import json
import os

import numpy
import torch
from torch_musa._MUSAC import device as _sim
from triton._utils import type_canonicalisation_dict
from triton.language import core
from triton.language.core import tensor
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.interpreter import save_time

from .instead import INSTEAD


class _Address:
    """Of a tensor among a launch's arguments: it is what a graph keeps, and not the memory."""


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, TensorDescriptor):
        yield value.base
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _replaced(value, tensors):
    if isinstance(value, (torch.Tensor, _Address)):
        return next(tensors)
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=next(tensors))
    if isinstance(value, (tuple, list)):
        made = [_replaced(item, tensors) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _addresses(value):
    """Arguments without the memory of their tensors; but a descriptor keeps its own, at which it looks when made."""
    if isinstance(value, torch.Tensor):
        return _Address()
    if isinstance(value, (tuple, list)):
        made = [_addresses(item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _bound(function, args, kwargs):
    """By name, without what Triton takes for itself."""
    signature = inspect.signature(function)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(*args, **known)
    bound.apply_defaults()
    return bound.arguments


def _log1p(arg0, _semantic=None):
    """The compiler's, where the interpreter has a function that does nothing."""
    return tensor(TensorHandle(numpy.log1p(arg0.handle.data), arg0.handle.dtype), arg0.type)


_SEEN = set()


def _kind(parameter, value):
    """How a compiler takes an argument: a type, or a constant's value."""
    if isinstance(value, torch.Tensor):
        return {"type": "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")].replace("u1", "i1")}
    if isinstance(value, interpreter.InterpretedFunction):
        return {"function": f"{value.fn.__module__}:{value.fn.__name__}"}
    if isinstance(value, core.dtype):
        return {"dtype": value.name}
    if value is None or "constexpr" in str(parameter.annotation) or isinstance(value, str):
        return {"constant": value if isinstance(value, (bool, int, float, str, type(None))) else str(value)}
    if isinstance(value, bool):
        return {"type": "i1"}
    if isinstance(value, int):
        # Triton makes a constant of it.
        return {"constant": 1} if value == 1 else {"type": "i32" if -(1 << 31) <= value < 1 << 31 else "i64"}
    return {"type": "fp32"} if isinstance(value, float) else {"other": type(value).__name__}


def _note_launch(file, function, args, kwargs):
    """Append a kernel with its arguments' types, once per process."""
    parameters = inspect.signature(function).parameters
    taken = {name: _kind(parameters[name], value) for name, value in _bound(function, args, kwargs).items()}
    line = json.dumps({"kernel": f"{function.__module__}:{function.__name__}", "arguments": taken})
    if line not in _SEEN:
        _SEEN.add(line)
        with open(file, "a") as output:
            output.write(line + "\n")


def install():
    save_time()
    libdevice.log1p = _log1p
    original = GridExecutor.__call__
    launches = os.environ.get("MUSA_SIM_LAUNCHES")

    def launch(self, *args, **kwargs):
        given = list(_tensors((args, tuple(kwargs.values()))))
        if launches:
            _note_launch(launches, self.fn, args, kwargs)
        for position, argument in enumerate(given):
            if argument.device.type != "musa" and not argument.is_pinned():
                raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")

        if callable(self.grid):
            # It may look at tensors, where the interpreter would show it values of the language.
            self.grid = self.grid(_bound(self.fn, args, kwargs))
        positional, named = _addresses(args), {name: _addresses(value) for name, value in kwargs.items()}

        def on_host(views):
            tensors = iter(views)
            there = _replaced(positional, tensors), {name: _replaced(value, tensors) for name, value in named.items()}
            if self.fn.__name__ in INSTEAD:
                instead, serves = INSTEAD[self.fn.__name__]
                arguments = _bound(self.fn, *there)
                if serves(arguments):
                    instead(arguments)
                    return
            original(self, *there[0], **there[1])

        _sim.launch(on_host, given)

    GridExecutor.__call__ = launch
    # The views share their memory with the device's tensors.
    GridExecutor._restore_args_dev = lambda *_: None
