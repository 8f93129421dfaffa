# SPDX-License-Identifier: Apache-2.0
"""A clean decision for each test, vLLM's real platform modules of any version, and a Moore Threads host to try on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_hwplugin
from vllm_hwplugin import linear, musa, spec_decode
from vllm_hwplugin.base import gates, log, run_records
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.platforms import _offer

from . import standins
from .realvllm import Load, RealVllm, own


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No gate is set, no run record is written, and nothing has been decided yet."""
    for gate in (*gates.GATES, *load_catalogue().gates):
        monkeypatch.delenv(gate.name, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    run_records.forget()
    _offer.decision.cache_clear()
    log.once.cache_clear()
    yield
    run_records.forget()
    _offer.decision.cache_clear()


@pytest.fixture
def real_vllm(monkeypatch: pytest.MonkeyPatch, vllm_tree: Callable[[str], Any]) -> Iterator[Load]:
    """`real_vllm("0.33.0")` makes that version's platform modules importable until the test ends."""
    pytest.importorskip("torch")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}

    def load(version: str, *, nvml: bool = True) -> RealVllm:
        vllm = RealVllm(version, vllm_tree(version), nvml)
        vllm.install(monkeypatch)
        return vllm

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def dflash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the platform classes call for DFlash, for the capture sizes of any drafter and for compile ranges, noted."""
    calls: list[str] = []
    hooks = SimpleNamespace(check_and_update_config=lambda config: calls.append("check_and_update_config"))
    sizes = SimpleNamespace(
        note_user_sizes=lambda config: calls.append("note_user_sizes"),
        check_and_update_config=lambda config: calls.append("set sizes"),
    )
    monkeypatch.setattr(vllm_hwplugin, "dflash", hooks, raising=False)
    ranges = SimpleNamespace(check_and_update_config=lambda config: calls.append("end a compile range"))
    monkeypatch.setattr(spec_decode, "capture_sizes", sizes, raising=False)
    monkeypatch.setattr(linear, "compile_ranges", ranges, raising=False)
    return calls


@pytest.fixture
def musa_host(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A host with the three packages; what ``torch.musa`` is asked is noted."""
    torch = pytest.importorskip("torch")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "musa", standins.musa(calls), raising=False)
    monkeypatch.setitem(sys.modules, "torchada", standins.torchada())
    monkeypatch.setitem(sys.modules, "pymtml", standins.pymtml())
    # Made anew, so that it binds the stand-in; and so that no later test meets it.
    monkeypatch.setattr(musa, "_mtml", own("vllm_hwplugin.musa._mtml"), raising=False)
    return calls
