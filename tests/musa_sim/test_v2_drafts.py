# SPDX-License-Identifier: Apache-2.0
"""Draft steps of Model Runner V2 on the simulated device: a released vLLM's engine under a load, stock and patched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ..conftest import cannot_run
from . import loads, simulated
from .loads import Engine, Load, Process

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine, pytest.mark.network]

FEATURES = ("V2_DRAFT_METADATA", "V2_FUSED_DRAFTS", "V2_GRAPH_ADDRESSES", "ENGINE_REPORT")


def test_all_draft_steps_are_one_launch_and_nothing_else_differs(musa_host: None, tmp_path: Path) -> None:
    version = "0.26.0"
    try:
        tree = simulated.released_vllm(version)
    except subprocess.CalledProcessError as error:
        cannot_run(f"vLLM {version} cannot be had: {error}")
    load = Load(Engine("eagle3").on_musa(), loads.mixed())
    sides = {"stock": {}, "patched": {f"VLLM_HWPLUGIN_{name}": "auto" for name in FEATURES}}
    processes = {
        side: Process(
            {side: load}, loads.musa(tmp_path / f"host, {side}", (version, tree), **{**loads.UNPATCHED, **variables})
        )
        for side, variables in sides.items()
    }
    runs = {name: run for found in loads.side_by_side(processes, tmp_path).values() for name, run in found.items()}
    stock, patched = runs["stock"], runs["patched"]
    loads.assert_same(stock, patched)
    assert "v2-fused-drafts" in patched.used
    assert stock.counts["draft_phases_in_graphs"] == patched.counts["draft_phases_in_graphs"]
    # The first pass, and each later step; or the first pass, and all later steps.
    assert patched.counts["graph_replays"]["draft"] < stock.counts["graph_replays"]["draft"]
