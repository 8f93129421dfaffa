# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with graphs and without, on the simulated device: a graph's padding changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.features import gate_of
from vllm_hwplugin_lab.bench._shapes import SHAPES, write_configs

from ..nwor.runs import GRAPHS
from . import loads
from .loads import Load

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

DRAFTS = 3
#: Qwen3-MoE in small.
SMALL = dataclasses.replace(
    SHAPES["30b-a3b"],
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=256,
    vocabulary=4096,
    more={**SHAPES["30b-a3b"].more, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
)


def options(folder: Path) -> dict[str, Any]:
    target, drafter = write_configs(SMALL, folder, "eagle3", DRAFTS + 1)
    made = loads.Engine("eagle3", drafts=DRAFTS).on_musa()
    return {**made, **loads.dummies(target, {**made["speculative_config"], "model": str(drafter)})}


def test_graphs_change_nothing(musa_host: None, tmp_path: Path) -> None:
    load = Load(options(tmp_path / "model"), loads.by_temperature())
    stock = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    gates = {gate_of(feature): "on" for feature in GRAPHS["V1"]} | {gate_of("engine-report"): "auto"}
    expected, found = loads.compare_runs(load, stock, stock | gates, tmp_path)
    assert (expected.runner, found.runner) == ("V1", "V1")
    assert set(GRAPHS["V1"]) <= set(found.used)
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    # Batches of three and five requests are padded.
    assert {3, 5} & found.widths()
    assert expected.counts["draft_phases_in_graphs"] == 0
    replayed = found.counts["graph_replays"]
    assert 0 < min(replayed["inputs"], replayed["sampling"]) <= found.counts["draft_phases_in_graphs"]
