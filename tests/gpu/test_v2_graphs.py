# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, more graphs on Model Runner V2 change no token and no draft, under a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..musa_sim import loads
from ..musa_sim.loads import Load
from .mixed_load import METHODS, MODES, compare, options

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

GRAPHS = ("v2-step-inputs", "v2-tail-graph")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_more_graphs_change_nothing(method: str, mode: str, tmp_path: Path) -> None:
    assert compare(Load(options(method, mode), loads.mixed()), tmp_path, "V2", GRAPHS).preempted


def test_nor_do_they_after_a_sleep(tmp_path: Path) -> None:
    """Which gives up the memory of the KV cache, and on some versions makes anew what graphs read of block tables."""
    made = {**options("eagle3", MODES[0]), "enable_sleep_mode": True}
    assert compare(Load(made, loads.mixed(), True), tmp_path, "V2", GRAPHS).preempted
