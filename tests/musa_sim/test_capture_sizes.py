# SPDX-License-Identifier: Apache-2.0
"""Decode batches above vLLM's own capture sizes, on the simulated device: those end at 8 tokens here, not at 512."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin.base.features import CAPTURE_SIZES, gate_of

from . import loads
from .loads import Engine, Load, Request
from .test_model_runner_v1 import GRAPHS as V1_GRAPHS
from .test_model_runner_v2 import WITH_GRAPHS as V2_GRAPHS

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

ENGINE = Engine("eagle3", more={"num_gpu_blocks_override": 32})
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 3, "backend": "eager"}
#: Tokens of vLLM's largest size, and of a step.
OWN, LARGEST = 8, 64
#: Six at once, whose prompts come while others decode.
REQUESTS = [
    Request("abcdef"[index], list(range(3 + index, 16 + 3 * index)), index, {"temperature": 0.0, "max_tokens": 30})
    for index in range(6)
]
LOAD = Load({**ENGINE.on_musa(), "compilation_config": GRAPHS}, REQUESTS, ceiling=OWN)


@pytest.mark.parametrize(
    ("graphs", "tail"),
    [(V2_GRAPHS, "v2-tail-graph drafting"), (V1_GRAPHS, "v1-draft-phase drafting")],
    ids=["V2", "V1"],
)
def test_every_decode_batch_has_graphs_of_target_and_tail(
    graphs: dict[str, str], tail: str, musa_host: None, newest: tuple[str, Path], tmp_path: Path
) -> None:
    """Tokens and drafts are the same without the feature, and with it for prompts, too."""
    off, mixed = ({**graphs, gate_of(CAPTURE_SIZES): gate} for gate in ("off", "mixed"))
    expected, found = loads.run_both({"": LOAD}, off, mixed, tmp_path, newest)[""]
    loads.assert_same(expected, found)
    assert {len(step["scheduled"]) for step in found.steps} >= {3, 6}
    without, with_it = (run.counted[tail] for run in (expected, found))
    # Each step without a prompt.
    assert with_it.keys() == {"prompt", "served"}
    assert with_it["served"] > without["served"] + 8
    assert CAPTURE_SIZES not in expected.used
    assert CAPTURE_SIZES in found.used
    assert f"up to {LARGEST} tokens" in found.noted[CAPTURE_SIZES]
    # Before the model is loaded, and after the captures; the others are vLLM's.
    assert found.freezes == expected.freezes + 2
