# SPDX-License-Identifier: Apache-2.0
"""Decode batches above vLLM's own capture sizes, on the simulated device: those end at 8 tokens here, not at 512."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin.base.features import CAPTURE_SIZES, gate_of

from . import loads
from .loads import Engine, Load, Process, Request, Run
from .test_model_runner_v2 import WITH_GRAPHS

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


RUNNERS = {"V1": loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "0", gate_of("engine-report"): "on"}, "V2": WITH_GRAPHS}


@pytest.fixture(scope="module", params=RUNNERS)
def runs(
    request: pytest.FixtureRequest,
    musa_host: None,
    newest: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    """The load without the feature, and with it for prompts, too."""
    folder = tmp_path_factory.mktemp("capture sizes")
    sides = {gate: RUNNERS[request.param] | {gate_of(CAPTURE_SIZES): gate} for gate in ("off", "mixed")}
    processes = {
        gate: Process({gate: LOAD}, loads.musa(folder / f"host, {gate}", newest, **sides[gate])) for gate in sides
    }
    return {gate: found[gate] for gate, found in loads.side_by_side(processes, folder).items()}


def test_tokens_and_drafts_are_the_same(runs: dict[str, Run]) -> None:
    loads.assert_same(runs["off"], runs["mixed"])
    assert {len(step["scheduled"]) for step in runs["mixed"].steps} >= {3, 6}


@pytest.mark.parametrize("runs", ["V2"], indirect=True)
def test_every_decode_batch_has_graphs_of_target_and_tail(runs: dict[str, Run]) -> None:
    without, found = ({**runs[gate].counted["v2-tail-graph drafting"]} for gate in ("off", "mixed"))
    # Each step without a prompt.
    assert found.keys() == {"prompt", "served"}
    assert found["served"] > without["served"] + 8


def test_what_is_captured_is_on_record(runs: dict[str, Run]) -> None:
    assert CAPTURE_SIZES not in runs["off"].used
    assert CAPTURE_SIZES in runs["mixed"].used
    assert f"up to {LARGEST} tokens" in runs["mixed"].noted[CAPTURE_SIZES]
