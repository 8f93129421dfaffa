# SPDX-License-Identifier: Apache-2.0
"""A clean decision for each test, and vLLM's real platform modules of any version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_hwplugin import gates, record
from vllm_hwplugin.platforms import _offer

from .realvllm import Load, RealVllm


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No gate is set, no process record is written, and nothing has been decided yet."""
    for gate in gates.GATES:
        monkeypatch.delenv(gate.name, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    record.forget()
    _offer.decision.cache_clear()
    yield
    record.forget()
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
