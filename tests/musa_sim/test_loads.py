# SPDX-License-Identifier: Apache-2.0
"""Runs of stock vLLM that are kept: for as long as they would be the same again, and no others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from . import loads
from .load_child import digest_of
from .loads import Engine, Load, Process

STOCK = {**loads.UNPATCHED, "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_HWPLUGIN_CACHE_DIR": "/one"}


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """What the child has imported."""
    path = tmp_path / "module.py"
    path.write_text("a = 1")
    return path


@pytest.fixture
def ran(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where children ran that found nothing."""
    folders: list[Path] = []

    def run_child(name: str, jobs: Mapping[str, Any], found: Path, environment: Any, folder: Path) -> None:
        folders.append(folder)
        folder.mkdir()
        run: dict[str, Any] = {field.name: None for field in dataclasses.fields(loads.Run)}
        run["preempted"] = len(folders)
        modules = {str(module): digest_of(module)}
        found.write_text(json.dumps({"runs": dict.fromkeys(jobs, run), "modules": modules}))

    monkeypatch.setattr(loads, "run_child", run_child)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folders


def run(folder: Path, name: str, drafts: int = 3, **variables: str) -> int:
    load = Load(Engine("eagle3", drafts=drafts).on_musa(), loads.by_temperature())
    (found,) = Process({"load": load}, STOCK | variables).run(folder / name).values()
    return found.preempted


def test_a_run_of_stock_is_made_once_and_anew_where_something_else_could_come_of_it(
    ran: list[Path], module: Path, tmp_path: Path
) -> None:
    assert [run(tmp_path, "first"), run(tmp_path, "second", VLLM_HWPLUGIN_CACHE_DIR="/other")] == [1, 1]
    assert ran == [tmp_path / "first"]
    assert run(tmp_path, "other load", 2) == 2
    assert run(tmp_path, "other variable", VLLM_USE_V2_MODEL_RUNNER="1") == 3
    gate = next(iter(loads.UNPATCHED))
    assert [run(tmp_path, name, **{gate: "auto"}) for name in ("with a feature", "again")] == [4, 5]
    module.write_text("a = 2")
    assert run(tmp_path, "other module") == 6
