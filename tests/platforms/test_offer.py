# SPDX-License-Identifier: Apache-2.0
"""The platform function as vLLM meets it: what it returns, logs and notes, and that it never raises."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin import plugin
from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.platforms import _offer
from vllm_hwplugin.platforms._offer import CLASSES

from .realvllm import entry_points, point


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`host("cuda", rivals=[...])`: vLLM's detection finds that, and those other plugins are installed."""

    def set_up(*builtins: str, rivals: list[Any] | None = None) -> ModuleType:
        platforms = ModuleType("vllm.platforms")
        platforms.builtin_platform_plugins = {  # type: ignore[attr-defined]
            name: (lambda name=name: name if name in builtins else None) for name in ("tpu", "cuda", "cpu")
        }
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        # An editable and an ordinary installation list the own one twice.
        own = [point("hwplugin", "own", _offer.OWN)] * 2
        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points([*own, *(rivals or [])]))
        return platforms

    return set_up


def test_strict_mode_stops_the_process_that_was_refused_the_class_it_named_and_no_other(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("cpu")
    monkeypatch.setenv("VLLM_HWPLUGIN_STRICT", "1")
    for choice in ("auto", "off"):
        monkeypatch.setenv("VLLM_HWPLUGIN_PLATFORM", choice)
        _offer.decision.cache_clear()
        assert plugin.platform() is None
        _offer.must_hold(gates.Settings())
    monkeypatch.setenv("VLLM_HWPLUGIN_PLATFORM", "cuda")
    _offer.decision.cache_clear()
    # vLLM swallows what is raised here.
    assert plugin.platform() is None
    with pytest.raises(_offer.PlatformError, match="VLLM_HWPLUGIN_PLATFORM=off to run without a class"):
        _offer.must_hold(gates.Settings())


@pytest.mark.parametrize("name", ["VLLM_HWPLUGIN", "VLLM_HWPLUGIN_PLATFORM"])
def test_a_bad_value_is_logged_once_and_offers_nothing(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    host("cuda")
    monkeypatch.setenv(name, "perhaps")
    assert [plugin.platform(), plugin.platform()] == [None, None]
    (entry,) = [item for item in caplog.records if item.levelno == logging.ERROR]
    assert f"{name}=perhaps" in entry.getMessage().replace("'", "")


@pytest.mark.parametrize(
    ("value", "counts"), [("hwplugin", False), ("", False), ("x, vendor", False), ("vendor", True)]
)
def test_a_rival_that_vllm_would_not_load_does_not_count(
    host: Any, monkeypatch: pytest.MonkeyPatch, value: str, counts: bool
) -> None:
    host("cuda", rivals=[point("vendor", "vendor.Platform")])
    monkeypatch.setenv("VLLM_PLUGINS", value)
    assert (plugin.platform() is None) == counts


def test_the_record_says_what_was_offered_and_what_vllm_runs_on(host: Any) -> None:
    platforms = host("cuda")
    plugin.platform()
    run_records.begin(run_records.new("0.1.0"), None)
    entry = run_records.current()
    assert entry is not None
    assert entry.decisions["platform"] == f"{CLASSES['cuda']}: vLLM's detection chooses CUDA"
    _offer.note_used()
    assert "runs on" not in entry.decisions["platform"]
    platforms._current_platform = ModuleType("standing in for a platform")
    _offer.note_used()
    assert entry.decisions["platform"].endswith("chooses CUDA; vLLM runs on builtins.module")
