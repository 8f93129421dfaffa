# SPDX-License-Identifier: Apache-2.0
"""A model that takes images on Model Runner V2, with graphs and without, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin.features import gate_of

from . import images, loads
from .loads import Load, Request

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

DRAFTS = 3


def test_graphs_change_nothing(musa_host: None, tmp_path: Path) -> None:
    """Behind an image the three positions of a token are less than what comes before it."""
    target, drafter = images.write_model(tmp_path / "model", DRAFTS)
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    options = {
        **loads.Engine("eagle3", drafts=DRAFTS).on_musa(),
        **loads.dummies(target, speculation),
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "max_num_batched_tokens": 96,
    }
    shown = [images.START, images.IMAGE, images.END]
    asked = [
        Request("a", list(range(3, 30)), 0, {"max_tokens": 20, "temperature": 0.0}),
        Request("b", [*range(40, 50), *shown, 7, 8, 9], 1, {"max_tokens": 20, "temperature": 0.0, "image": 1}),
        Request("c", [5, *shown, *range(60, 66)], 3, {"max_tokens": 16, "temperature": 0.8, "seed": 5, "image": 2}),
        Request("d", list(range(70, 90)), 9, {"max_tokens": 12, "temperature": 0.0}),
    ]
    load = Load(options, asked, autotuned=False, initialised=True, images=True)
    stock = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    gates = {gate_of(one): "on" for one in ("v2-tail-graph", "v2-step-inputs", "v2-graph-addresses")}
    gates[gate_of("engine-report")] = "auto"
    expected, found = loads.compare_runs(load, stock, stock | gates, tmp_path)
    assert (expected.runner, found.runner) == ("V2", "V2")
    assert {"v2-tail-graph", "v2-step-inputs"} <= set(found.used)
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    steps = found.counted["v2-step-inputs inputs"]
    assert steps["served"] == found.counts["graph_replays"]["inputs"] > 5
