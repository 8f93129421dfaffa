# SPDX-License-Identifier: Apache-2.0
"""Other platform plugins: which vLLM would load, and which offer a class."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.platforms import _offer

from .realvllm import entry_points


def point(name: str, answer: Any, value: str = "vendor:platform", group: str = _offer.GROUP) -> Any:
    def function() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def load() -> Any:
        if isinstance(answer, ImportError):
            raise answer
        return function

    return SimpleNamespace(name=name, value=value, group=group, load=load)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        point("hwplugin", "own", _offer.OWN),
        point("hwplugin", "own", _offer.OWN),
        point("vendor", "vendor.Platform"),
        point("elsewhere", None),
        point("broken", ImportError("no driver")),
        point("failing", RuntimeError("no device")),
        point("general", "x", group="vllm.general_plugins"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points(points))


@pytest.mark.usefixtures("installed")
def test_the_own_entry_point_is_no_rival_and_other_groups_are_not_looked_at() -> None:
    assert [item.name for item in _offer.others({})] == ["vendor", "elsewhere", "broken", "failing"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("value", "names"), [("hwplugin", []), ("hwplugin,vendor", ["vendor"]), ("", []), ("hwplugin, vendor", [])]
)
def test_vllm_plugins_filters_by_name_as_vllm_reads_it(value: str, names: list[str]) -> None:
    assert [item.name for item in _offer.others({"VLLM_PLUGINS": value})] == names


@pytest.mark.usefixtures("installed")
def test_only_a_plugin_that_offers_a_class_is_active() -> None:
    assert _offer.active(_offer.others({})) == ("vendor",)
