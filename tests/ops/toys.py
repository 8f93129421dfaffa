# SPDX-License-Identifier: Apache-2.0
"""Operations of vLLM and kernels of the plugin to put in front of them, made for one test."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from vllm_hwplugin.ops import definitions, overrides
from vllm_hwplugin.ops.operations import Operation

_numbers = itertools.count()


@dataclass
class Toy:
    """vLLM's operation writes 1, or 1 + more; the plugin's writes 2, and refuses float64."""

    op: Operation
    calls: list[str]

    @property
    def theirs(self) -> Any:
        return getattr(getattr(torch.ops, self.op.namespace), self.op.name).default

    def __call__(self, *args: Any, dtype: torch.dtype = torch.float32) -> float:
        out = torch.zeros(3, dtype=dtype)
        self.theirs(out, *args)
        return float(out[0])

    def in_front(self, *, required: bool = False) -> overrides.Override:
        return overrides.put_in_front(self.op, "CPU", "on", required=required)


def make_toy(
    monkeypatch: pytest.MonkeyPatch,
    text: str = "(Tensor! out, Tensor? bias, int more=0) -> ()",
    own: str = "(Tensor(a!) out, Tensor? bias) -> ()",
    *,
    defined: bool = False,
) -> Toy:
    """An operation; vLLM's extension has it, or with ``defined`` the plugin's definitions alone."""
    number = next(_numbers)
    name, namespace = f"toy{number}", f"_Ctoy{number}"
    calls: list[str] = []

    def stock(out: torch.Tensor, *args: Any) -> None:
        calls.append("stock")
        more = args[1] if len(args) > 1 else 0
        out.fill_(more + 1 if isinstance(more, int) else 9)

    libraries = []
    if not defined:
        theirs = torch.library.Library(namespace, "DEF")
        theirs.define(name + text)
        theirs.impl(name, stock, "CPU")
        libraries.append(theirs)

    def kernel(out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        calls.append("plugin")
        if out.dtype == torch.float64:
            raise RuntimeError(f"{name}: out is float64; expected float32")
        if bias is not None and bias.numel() == 0:
            raise RuntimeError("a fault of the device")
        out.fill_(2)

    ours = torch.library.Library("hwplugin", "FRAGMENT")
    ours.define(name + own)
    ours.impl(name, kernel, "CPU")
    module = ModuleType(f"vllm_hwplugin.ops.{name}")
    module.libraries = (*libraries, ours)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(overrides, "load_kernel", lambda op: calls.append("load") is None)
    op = Operation(name, namespace, "the tests", ("out",))  # type: ignore[arg-type]
    if defined:
        monkeypatch.setattr(definitions, "DEFINED", MappingProxyType({name: op}))
        monkeypatch.setattr(definitions, "described", lambda item: (own, stock))
    return Toy(op, calls)
