# SPDX-License-Identifier: Apache-2.0
"""The names of a host's GPUs, from a stand-in for NVML's binding and from the ones that vLLM's versions bring."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin.ops import overrides
from vllm_hwplugin.ops.overrides import gpu_names

from ..conftest import versions


class Nvml(ModuleType):
    """As `vllm.third_party.pynvml`, with a count of what was started and not ended."""

    class NVMLError(Exception):
        pass

    def __init__(self, *names: str, broken: str = "") -> None:
        super().__init__(overrides._BINDING)
        self.names, self.broken, self.open = names, broken, 0

    def _step(self, name: str) -> None:
        if name == self.broken:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._step("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open == 1
        self._step("count")
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._step("handle")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        self._step("name")
        return self.names[handle]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return lambda module: monkeypatch.setitem(sys.modules, overrides._BINDING, module)


def test_every_gpu_of_the_host_is_named_whatever_this_process_may_see(
    use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    nvml = Nvml("NVIDIA H200", "NVIDIA H200", "NVIDIA T400")
    use(nvml)
    assert gpu_names() == {"NVIDIA H200", "NVIDIA T400"}
    assert nvml.open == 0


@pytest.mark.parametrize("broken", ["init", "count", "handle", "name"])
def test_a_driver_that_does_not_answer_leaves_it_open(broken: str, use: Callable[[Any], None]) -> None:
    nvml = Nvml("NVIDIA H200", broken=broken)
    use(nvml)
    assert gpu_names() is None
    assert nvml.open == 0


def test_so_does_a_driver_that_counts_none_and_a_vllm_without_the_binding(use: Callable[[Any], None]) -> None:
    use(Nvml())
    assert gpu_names() is None
    use(None)
    assert gpu_names() is None


@pytest.mark.parametrize("version", versions("vllm/third_party/pynvml.py"))
def test_every_version_brings_what_is_called(version: str, vllm_tree: Callable[[str], Any]) -> None:
    text = vllm_tree(version).read(overrides._BINDING.replace(".", "/") + ".py")
    has = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(re.findall(r"nvml\.(\w+)", inspect.getsource(gpu_names))) <= has


@pytest.mark.engine
def test_the_installed_binding_answers_or_says_why_not() -> None:
    torch = pytest.importorskip("torch")
    names = gpu_names()
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/ops/test_overrides.py compares the names of a host with GPUs")
    assert names is None
