# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, steps with prompts of a model with a gated delta rule are replays, and no token or draft differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..musa_sim import loads
from ..musa_sim.loads import Load
from ..musa_sim.test_hybrids import with_prompts
from .engines import needs
from .mixed_load import run_each
from .small_shapes import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

FEATURE = "v2-mixed-graphs"
#: Multiples of 32, as graphs of mixed batches have them: PIECEWISE graphs of the same sizes round alike.
SIZES = [32, 64, 96, 128]


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_graphs_change_nothing(keeps_prefixes: bool, tmp_path: Path) -> None:
    """With kernels that sum alike whatever else is in a batch, and Triton's for prompts."""
    needs("0.32")
    case = CASES["hybrid"]
    options = case.engine(tmp_path / "model") | {
        "enable_prefix_caching": keeps_prefixes,
        "max_num_batched_tokens": 128,
        "long_prefill_token_threshold": 20,
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": SIZES},
    }
    load = Load(options, with_prompts(), autotuned=False, initialised=True)
    sides = {"off": {}, "on": {FEATURE: "on"}}
    runs = run_each(load, tmp_path, "V2", sides, (FEATURE,), **case.variables)
    expected, found = runs["off"], runs["on"]
    replays = {side: run.counts["graph_replays"]["target"] for side, run in runs.items()}
    loads.assert_same(expected, found)
    assert FEATURE in found.used
    assert 0 < expected.accepted()[-1] < expected.accepted()[0]
    # A model in PIECEWISE graphs is several replays a step.
    assert replays["on"] == len(found.steps) < replays["off"]
