# SPDX-License-Identifier: Apache-2.0
"""What the tests of several kernels ask: is it the kernel that runs, from a graph too, and do two results have one bit
pattern, or how many numbers lie between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from vllm_hwplugin.ops.compile import torch_build
from vllm_hwplugin.ops.compile.jit import ensure, provide
from vllm_hwplugin.ops.compile.spec import KernelSpec

from ...ops.operation_checks import replay_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Call(Protocol):
    """Arguments of an operation, which `refill` changes in place."""

    def refill(self) -> None: ...

    def run(self) -> None: ...


def load_kernel(spec: KernelSpec, key: str = "CUDA") -> None:
    """Without it the reference would be compared with its like. Raises with the compiler's words."""
    provide(spec, torch_build.installed())
    assert ensure(spec)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"hwplugin::{spec.name}", key)


def vllms(name: str, namespace: str = "_C") -> Any:
    """The operation of the installed vLLM; skips the test where there is none."""
    pytest.importorskip("vllm._custom_ops")
    return getattr(getattr(torch.ops, namespace), name).default


def captured(call: Call) -> Callable[[], None]:
    """Runs the call once and captures it; the graph's replay."""
    call.refill()
    return replay_of(call.run, "cuda")


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
