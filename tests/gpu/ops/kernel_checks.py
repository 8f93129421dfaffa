# SPDX-License-Identifier: Apache-2.0
"""What the tests of several kernels ask: is it the kernel that runs, from a graph too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from vllm_hwplugin.ops.compile import torch_build
from vllm_hwplugin.ops.compile.jit import ensure, provide
from vllm_hwplugin.ops.compile.spec import KernelSpec

from ...ops.operation_checks import replay_of

#: Of a captured call, each with other contents.
REPLAYS = 32


class Call(Protocol):
    """Arguments of an operation, which `refill` changes in place.

    `check` runs the operation by what it is given, and compares with the definition.
    """

    def refill(self) -> None: ...

    def run(self) -> None: ...

    def check(self, run: Callable[[], None]) -> None: ...


def load_kernel(spec: KernelSpec, key: str = "CUDA") -> None:
    """Without it the reference would be compared with its like. Raises with the compiler's words."""
    provide(spec, torch_build.installed())
    assert ensure(spec)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"hwplugin::{spec.name}", key)


def vllms(name: str, namespace: str = "_C") -> Any:
    """The operation of the installed vLLM; skips the test where there is none."""
    pytest.importorskip("vllm._custom_ops")
    return getattr(getattr(torch.ops, namespace), name).default


def check_in(mode: str, call: Call, replays: int = REPLAYS) -> None:
    """Check the call ``eager``, the graph that it is ``captured`` in, or many contents of one that is ``replayed``."""
    call.refill()
    run = call.run if mode == "eager" else replay_of(call.run, "cuda")
    for _ in range(replays if mode == "replayed" else 1):
        call.refill()
        call.check(run)
