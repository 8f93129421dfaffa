# SPDX-License-Identifier: Apache-2.0
"""The record of a library: what it says, which devices it is for, and what counts as none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.ops.compile import built
from vllm_hwplugin.ops.compile.ninja import build
from vllm_hwplugin.ops.compile.plan import BuildPlan

MakePlan = Callable[..., BuildPlan]
Provide = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("ninja")


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        ("9.0", [(9, 0)], [(8, 0), (10, 0)]),
        ("8.0", [(8, 0), (8, 9)], [(7, 5), (9, 0)]),
        ("8.0+PTX", [(8, 6), (9, 0), (12, 0)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(9, 1), (10, 0)]),
    ],
)
def test_which_devices_a_library_runs_on(
    plan: MakePlan, tmp_path: Path, arch: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]
) -> None:
    build(plan(environ={"TORCH_CUDA_ARCH_LIST": arch}, ahead=True), tmp_path, os.environ)
    found = built.read(tmp_path)
    assert found is not None
    assert [item for item in runs + does_not if found.runs_on(item)] == runs


@pytest.mark.parametrize(
    "change",
    [
        "{",
        "[]",
        '{"format": 1}',
        "[" * 200_000,
        {"format": 2},
        {"kernel": 7},
        {"arch": [7]},
        {"arch": None},
        {"flags": [{"flags": [7], "reason": "none"}]},
        {"changes_numerics": 7},
        {"library": "../library.so"},
        None,
    ],
)
def test_a_record_that_cannot_be_read_or_says_what_it_cannot_counts_as_none(
    provide: Provide, own_cache: Path, change: dict[str, object] | str | None
) -> None:
    library = provide()
    record = library.parent / "built.json"
    # As large as the record says.
    shutil.copy(library, record.parent.parent / "library.so")
    if change is None:
        library.unlink()
    else:
        whole = json.loads(record.read_text())
        record.write_text(change if isinstance(change, str) else json.dumps(whole | change))
    assert built.read_all([own_cache], []) == []
