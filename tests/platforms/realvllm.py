# SPDX-License-Identifier: Apache-2.0
"""vLLM's real platform modules of any version, executed from their text; everything that they import is a stub.

Text and behaviour are that version's own: ``Platform``, the CUDA classes, the resolver, the loader of plugins and the
registry of attention backends. What they import of vLLM beside that answers every name with a ``MagicMock``; torch is
the installed one.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import vllm_hwplugin
from vllm_hwplugin.platforms import _offer

from ..stubbed_vllm import StubbedVllm, forget_vllm

REAL = {
    "vllm.platforms": "vllm/platforms/__init__.py",
    "vllm.platforms.interface": "vllm/platforms/interface.py",
    "vllm.platforms.cuda": "vllm/platforms/cuda.py",
    "vllm.plugins": "vllm/plugins/__init__.py",
    "vllm.v1.attention.backends.registry": "vllm/v1/attention/backends/registry.py",
}


class RealVllm(StubbedVllm):
    """``install`` puts the import hook in front for the length of a test."""

    def __init__(self, version: str, tree: Any, nvml: bool = True) -> None:
        def import_pynvml() -> Any:
            if nvml:
                return MagicMock(nvmlDeviceGetCount=lambda: 1)
            return MagicMock(nvmlInit=MagicMock(side_effect=RuntimeError("NVML is not supported")))

        unset = dict.fromkeys(("VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"))
        given = {
            "vllm.logger": {"init_logger": _logger},
            "vllm.envs": {"VLLM_TARGET_DEVICE": "cuda", "VLLM_TPU_USING_PATHWAYS": False, **unset},
            "vllm.utils.import_utils": {"import_pynvml": import_pynvml, "resolve_obj_by_qualname": resolve},
        }
        super().__init__(version, tree, REAL, given)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forget_vllm()
        monkeypatch.setattr(sys, "meta_path", [self, *sys.meta_path])


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for method in ("debug", "info", "warning"):
        setattr(logger, f"{method}_once", getattr(logger, method))
    return logger


def resolve(qualname: str) -> Any:
    """As vLLM's ``resolve_obj_by_qualname``, but the plugin's classes are made anew on the vLLM that is installed."""
    module, _, name = qualname.rpartition(".")
    return getattr(own(module) if module.startswith("vllm_hwplugin.") else importlib.import_module(module), name)


def own(name: str) -> ModuleType:
    """Execute a module of the plugin, on the vLLM that is imported now; it is not kept."""
    file = Path(vllm_hwplugin.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Load = Callable[..., RealVllm]


def entry_points(points: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """A stand-in for ``importlib.metadata.entry_points``."""

    def find(*, group: str, **_: Any) -> Sequence[Any]:
        return [point for point in points if point.group == group]

    return find


def point(name: str, answer: Any, value: str = "vendor:platform") -> Any:
    """An entry point of a platform plugin; its function gives `answer`, or raises it; it cannot be loaded where that is
    an ImportError.
    """

    def function() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def load() -> Any:
        if isinstance(answer, ImportError):
            raise answer
        return function

    return SimpleNamespace(name=name, value=value, group=_offer.GROUP, load=load)
