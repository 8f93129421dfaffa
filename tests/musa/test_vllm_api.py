# SPDX-License-Identifier: Apache-2.0
"""The adapter between the MUSA platform and vLLM's versions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.musa import _vllm_api

from ..conftest import versions


def test_the_worker_meets_cuda_during_its_start_and_never_after() -> None:
    config = SimpleNamespace(device_type="musa")
    cuda = SimpleNamespace(is_available=lambda: False)
    musa = SimpleNamespace(is_available=lambda: True)
    stock = cuda.is_available
    with _vllm_api.taken_for_cuda(config, cuda, musa):
        assert config.device_type == "cuda"
        assert cuda.is_available()
    assert (config.device_type, cuda.is_available) == ("musa", stock)
    with pytest.raises(RuntimeError), _vllm_api.taken_for_cuda(config, cuda, musa):
        raise RuntimeError
    assert (config.device_type, cuda.is_available) == ("musa", stock)


def test_fusions_that_are_on_are_switched_off_and_named() -> None:
    config = SimpleNamespace(
        fuse_norm_quant=True, fuse_act_quant=False, fuse_attn_quant=None, enable_sp=True, eliminate_noops=True
    )
    assert _vllm_api.switch_off_fusions(config) == ("fuse_norm_quant", "enable_sp")
    assert vars(config) == {
        "fuse_norm_quant": False,
        "fuse_act_quant": False,
        "fuse_attn_quant": None,
        "enable_sp": False,
        "eliminate_noops": True,
    }


@pytest.mark.parametrize("version", versions("vllm/config/compilation.py"))
def test_every_switch_of_vllms_passes_is_a_fusion_or_known(version: str, vllm_tree: Callable[[str], Any]) -> None:
    """A switch under a new name would fuse into kernels that are not there."""
    text = vllm_tree(version).read("vllm/config/compilation.py")
    (config,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "PassConfig"]
    switches = {
        node.target.id
        for node in config.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "bool"
    }
    settings = SimpleNamespace(**dict.fromkeys(switches, True))
    assert switches - set(_vllm_api.switch_off_fusions(settings)) == {"eliminate_noops"}


def test_kernels_that_are_there_are_imported_and_the_others_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _vllm_api._KERNELS:
        monkeypatch.setitem(sys.modules, name, None)
    assert _vllm_api.import_kernels() == ()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    assert _vllm_api.import_kernels() == ("vllm._C_stable_libtorch",)
