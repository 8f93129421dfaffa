# SPDX-License-Identifier: Apache-2.0
"""The self-test on the simulated device, without a fault and with each.

`python -m tests.musa_sim.self_test_child FOUND`. Of each fault FOUND has the checks that are not right, and what is
refused.
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from unittest import mock

import mate
import torch
from triton.runtime.interpreter import GridExecutor
from vllm.platforms import current_platform

from vllm_hwplugin.musa import layers, self_test, self_test_checks

E4M3 = torch.float8_e4m3fn


def kernel(name, spoil, **options):
    """A launch of a kernel with these options leaves other values."""
    original = GridExecutor.__call__

    def launch(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.fn.__name__ == name and options.items() <= kwargs.items():
            spoil(args)

    return mock.patch.object(GridExecutor, "__call__", launch)


def function(owner, name, spoil):
    """A function of torch's or mate's whose result `spoil` replaces: it is given the result and the arguments."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: spoil(original(*args, **kwargs), *args, **kwargs))


def overflow(result, given, *_, **__):
    if isinstance(result, torch.Tensor) and result.dtype == E4M3 and given.dtype == torch.float32:
        result = result.clone()
        result.view(torch.uint8)[given.abs() > 448] = 0x7F
    return result


@contextlib.contextmanager
def late_copies():
    """A copy on another stream than the default one is done when the device is waited for, whatever events say."""
    copy, synchronize, waiting = torch.Tensor.copy_, torch.musa.synchronize, []

    def late(self, source, *args, **kwargs):
        if torch.musa.current_stream().stream_id == torch.musa.default_stream().stream_id:
            return copy(self, source, *args, **kwargs)
        waiting.append((self, source.clone()))
        return self

    def flush(*args):
        while waiting:
            copy(*waiting.pop(0))
        synchronize(*args)

    with mock.patch.object(torch.Tensor, "copy_", late), mock.patch.object(torch.musa, "synchronize", flush):
        yield


def attention(length):
    def spoil(result, *_, max_seqlen_q, **__):
        return result * (0 if max_seqlen_q == length and torch.musa.is_current_stream_capturing() else 1)

    return function(mate, "flash_attn_varlen_func", spoil)


def zeros_of(rows):
    return lambda result, given, *_, **__: result * (0 if len(given) == rows else 1)


FAULTS = {
    "none": contextlib.nullcontext,
    "mm": lambda: function(torch, "mm", lambda result, *_, **options: result * (0 if options else 1)),
    "mask": lambda: kernel("count_bits_kernel", lambda args: args[1].fill_(1)),
    "mask in int32": lambda: kernel("count_kernel", lambda args: args[1].fill_(1)),
    "alias": lambda: kernel("in_place_kernel", lambda args: args[3].sub_(2)),
    "1 stage": lambda: kernel("dot_kernel", lambda args: args[2].zero_(), num_stages=1),
    "3 stages": lambda: kernel("dot_kernel", lambda args: args[2].zero_(), num_stages=3),
    "1 row": lambda: function(torch, "_scaled_mm", zeros_of(1)),
    "17 rows": lambda: function(torch, "_scaled_mm", zeros_of(17)),
    "32 bits": lambda: function(torch, "_scaled_mm", lambda result, *_, **__: result * (result.itemsize < 4)),
    "no _scaled_mm": lambda: mock.patch.object(torch, "_scaled_mm", side_effect=NotImplementedError("no such kernel")),
    "e4m3": lambda: function(torch.Tensor, "to", overflow),
    "event": late_copies,
    "graph": lambda: mock.patch.object(torch.musa.MUSAGraph, "replay"),
    "attention 1": lambda: attention(1),
    "attention 4": lambda: attention(4),
    "cannot run": lambda: mock.patch.object(torch, "eye", side_effect=NotImplementedError("no such kernel")),
}


def config(drafter=None, *, ahead=True, graphs="FULL_AND_PIECEWISE", hybrid=False):
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        speculative_config=drafter and SimpleNamespace(method=drafter),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs]),
        model_config=SimpleNamespace(is_hybrid=hybrid),
    )


#: Engines that are each refused by other checks.
ENGINES = {
    "eager": config(graphs="NONE"),
    "eager, hybrid": config(graphs="NONE", hybrid=True),
    "eager, draft model": config("eagle3", ahead=False, graphs="NONE"),
    "eager, draft model, async": config("eagle3", graphs="NONE"),
    "eager, n-gram, async": config("ngram", graphs="NONE"),
    "pieces, draft model": config("eagle3", ahead=False, graphs="PIECEWISE"),
    "graphs": config(),
    "graphs, draft model": config("mtp", ahead=False),
}
KERNELS = (layers.MusaFp8TensorKernel, layers.MusaFp8ChannelKernel, layers.MusaFp8BlockKernel, layers.MusaInt8Kernel)
#: Of a linear layer in FP8.
LAYER = SimpleNamespace(weight_shape=(64, 64))


def refused():
    for name, engine in ENGINES.items():
        try:
            self_test_checks.check_config(engine)
        except ValueError:
            yield name
    for kernel in KERNELS:
        if not kernel.is_supported()[0]:
            yield kernel.__name__
    with mock.patch.object(layers.PerTensorTorchFP8ScaledMMLinearKernel, "__init__"):
        if layers.MusaFp8TensorKernel(LAYER).trouble:
            yield "dequantized"
    if not layers._EXPERTS._supports_current_device():
        yield "experts"
    if self_test.find_wrong(self_test_checks.TOP_K):
        yield "top-k"


if __name__ == "__main__":
    assert current_platform.device_name == "musa"
    found, device = {}, torch.device("musa:0")
    for fault, inject in FAULTS.items():
        self_test._wrong.clear()
        with inject():
            results = self_test_checks.run(device)
        self_test.note_results(results)
        failed = {result.name: result.state for result in results if result.state != "right"}
        found[fault] = [failed, list(refused())]
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
