# SPDX-License-Identifier: Apache-2.0
"""Operations of vLLM and kernels of the plugin to put in front of them, made for one test."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from vllm_hwplugin.ops import _override_support, definitions, overrides
from vllm_hwplugin.ops.compile import spec
from vllm_hwplugin.ops.definitions import Definition
from vllm_hwplugin.ops.override_table import OverridableOp, Schema

_numbers = itertools.count()


@dataclass
class Toy:
    """vLLM's operation writes 1, or 1 + more; the plugin's writes 2."""

    op: OverridableOp
    calls: list[str]

    @property
    def theirs(self) -> Any:
        return getattr(getattr(torch.ops, self.op.namespace), self.op.name).default

    def __call__(self, *args: Any, dtype: torch.dtype = torch.float32) -> float:
        out = torch.zeros(3, dtype=dtype)
        self.theirs(out, *args)
        return float(out[0])

    def in_front(self, choice: str = "on", *, required: bool = False) -> overrides.Override:
        override = overrides.put_in_front(self.op, "CPU", choice, required=required)
        overrides._overrides[self.op.name] = override
        return override


def make_toy(
    monkeypatch: pytest.MonkeyPatch,
    text: str = "(Tensor! out, Tensor? bias, int more=0) -> ()",
    own: str = "(Tensor(a!) out, Tensor? bias) -> ()",
    *,
    defined: bool = False,
) -> Toy:
    """An operation; vLLM's extension has it, or with ``defined`` the plugin's table of definitions alone."""
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
        out.fill_(2)

    ours = torch.library.Library("hwplugin", "FRAGMENT")
    ours.define(name + own)
    ours.impl(name, kernel, "CPU")
    module = ModuleType(f"vllm_hwplugin.ops.{name}")
    module.libraries = (*libraries, ours)  # type: ignore[attr-defined]
    module._reference = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernels = {**spec.KERNELS, name: replace(spec.ROTARY_EMBEDDING, name=name)}
    monkeypatch.setattr(spec, "KERNELS", MappingProxyType(kernels))
    monkeypatch.setattr(_override_support, name, lambda out, bias=None: out.dtype is torch.float32, raising=False)
    monkeypatch.setattr(overrides, "load_kernel", lambda op: calls.append("load") is None)
    op = OverridableOp(name, namespace, (Schema(">=0.20", name + text),))  # type: ignore[arg-type]
    if defined:
        item = Definition(name, namespace, op.schemas, name, "_reference", "")  # type: ignore[arg-type]
        table = MappingProxyType({**definitions.DEFINITIONS, name: item})
        monkeypatch.setattr(definitions, "DEFINITIONS", table)
    return Toy(op, calls)
