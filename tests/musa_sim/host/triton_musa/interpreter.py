# SPDX-License-Identifier: Apache-2.0
"""Launches on the simulated device: Triton's interpreter on the device's own memory, recorded in captures.

The interpreter's way with other devices is to copy each argument's whole storage to the host and back.
"""

import dataclasses
import inspect

import numpy
import torch
from torch_musa._MUSAC import device as _sim
from triton.language.core import tensor
from triton.language.extra import libdevice
from triton.runtime.interpreter import GridExecutor, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor


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


def _topk_topp(arguments):
    """vLLM's kernel takes ``.to`` of a loop's index, an int in the interpreter: its torch counterpart instead."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = arguments["LOGITS"]
    k = arguments["K"] if arguments["TOPK_ENABLED"] else None
    p = arguments["P"] if arguments["TOPP_ENABLED"] else None
    logits.copy_(apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True))


# What stands for a kernel that the interpreter cannot run.
INSTEAD = {"_topk_topp_kernel": _topk_topp}


def _log1p(arg0, _semantic=None):
    """The compiler's, where the interpreter has a function that does nothing."""
    return tensor(TensorHandle(numpy.log1p(arg0.handle.data), arg0.handle.dtype), arg0.type)


def install():
    libdevice.log1p = _log1p
    original = GridExecutor.__call__

    def launch(self, *args, **kwargs):
        given = list(_tensors((args, tuple(kwargs.values()))))
        for position, argument in enumerate(given):
            if argument.device.type != "musa" and not argument.is_pinned():
                raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")

        positional, named = _addresses(args), {name: _addresses(value) for name, value in kwargs.items()}

        def on_host(views):
            tensors = iter(views)
            there = _replaced(positional, tensors), {name: _replaced(value, tensors) for name, value in named.items()}
            instead = INSTEAD.get(self.fn.__name__)
            if instead is None:
                original(self, *there[0], **there[1])
                return
            names = inspect.signature(self.fn).parameters
            known = {name: value for name, value in there[1].items() if name in names}
            instead(inspect.signature(self.fn).bind(*there[0], **known).arguments)

        _sim.launch(on_host, given)

    GridExecutor.__call__ = launch
    # The views share their memory with the device's tensors.
    GridExecutor._restore_args_dev = lambda *_: None
