# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, more graphs on Model Runner V1 change no token and no draft, under a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..musa_sim import loads
from ..musa_sim.loads import Load
from .mixed_load import METHODS, MODES, compare, options

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Beside the drafters' own graphs, which both sides have.
GRAPHS = ("v1-step-inputs", "v1-draft-phase")


def check(made: dict[str, Any], folder: Path, *, after_sleep: bool = False) -> None:
    assert compare(Load(made, loads.mixed(), after_sleep), folder, "V1", GRAPHS).preempted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_more_graphs_change_nothing(method: str, mode: str, tmp_path: Path) -> None:
    check({**options(method, mode), "async_scheduling": True}, tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_the_scheduler_waits_for_each_step(method: str, tmp_path: Path) -> None:
    check({**options(method, MODES[0]), "async_scheduling": False}, tmp_path)


def test_nor_do_they_after_a_sleep(tmp_path: Path) -> None:
    """Which gives up the memory of the KV cache."""
    made = {**options("eagle3", MODES[0]), "async_scheduling": True, "enable_sleep_mode": True}
    check(made, tmp_path, after_sleep=True)


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_drafts_are_drawn_by_temperature(method: str, tmp_path: Path) -> None:
    made = {**options(method, MODES[0]), "async_scheduling": True}
    made["speculative_config"]["draft_sample_method"] = "probabilistic"
    compare(Load(made, loads.by_temperature()), tmp_path, "V1", GRAPHS)
