# SPDX-License-Identifier: Apache-2.0
"""Modules of a released vLLM, executed from its text; what they import of vLLM beside these is a stub."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import MagicMock


class StubbedVllm:
    """An import hook and its loader.

    Args:
        tree: the version's text.
        real: module -> its path in vLLM. Every other module of vLLM answers each name with a ``MagicMock``.
        given: module -> names that it has beside that.
    """

    def __init__(
        self,
        version: str,
        tree: Any,
        real: Mapping[str, str],
        given: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.version, self._tree, self._real, self._given = version, tree, real, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return ModuleSpec(name, self, is_package=self._real.get(name, "__init__.py").endswith("__init__.py"))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.name in self._real else _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))
        if (path := self._real.get(module.__name__)) is not None:
            text = self._tree.read(path)
            assert text is not None, f"vLLM {self.version} has no {path}"
            exec(compile(text, path, "exec", dont_inherit=True), vars(module))


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def forget_vllm() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
