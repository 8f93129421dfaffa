# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong while graphs are captured on the V1 runner, vLLM starts and serves what it does without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm_hwplugin.base.fallback import FeatureRequired
from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin.spec_decode.v1 import draft_full_graph, draft_phase, step_inputs
from vllm_hwplugin.spec_decode.v1.draft_loop_graph import ChainGraphs
from vllm_hwplugin.spec_decode.v1.draft_phase_graphs import PhaseRecorder

from ..test_order_of_calls import KINDS, both
from ..v2.released_modules import Graph
from ..walks import live_load

ALL = {"draft-full-graph", "draft-loop-graph", "v1-draft-phase"}
#: What raises, at which call, and whether only calls in a capture count; the features that are lost.
CAPTURES: dict[str, tuple[tuple[Any, str], int, bool, set[str]]] = {
    "buffers of passes": ((draft_full_graph, "DraftBuffers"), 1, False, ALL),
    "passes": ((draft_full_graph.PassGraphs, "_call_model"), 2, True, ALL),
    "the chain": ((ChainGraphs, "_chain"), 2, True, ALL - {"draft-full-graph"}),
    "buffers of the phase": ((draft_phase, "PhaseBuffers"), 1, False, {"v1-draft-phase"}),
    "drafting": ((PhaseRecorder, "_draft"), 2, True, {"v1-draft-phase"}),
    "inputs": ((step_inputs.StepInputs, "_advance"), 2, True, {"v1-step-inputs"}),
}


def raising(function: Callable[..., Any], at: int, captured: bool) -> Callable[..., Any]:
    calls = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if Graph.capturing is not None or not captured:
            calls.append(None)
            if len(calls) == at:
                raise AssertionError("out of memory\nmore")
        return function(*args, **kwargs)

    return fails


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_capture_that_raises_costs_its_graphs_and_not_the_start(
    vllm_here: Any, capture: str, used: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, name), *when, lost = CAPTURES[capture]
    monkeypatch.setattr(owner, name, raising(getattr(owner, name), *when))
    with both(vllm_here) as sides:
        assert {feature for feature in {*ALL, "v1-step-inputs"} if not used.get(feature, True)} == lost
        live_load(sides, KINDS)
    runner = sides.both[1].runner
    served = {"v1-draft-phase": runner.draft_phase._drafting, "v1-step-inputs": runner.step_inputs._step_counts}
    assert {feature for feature, counts in served.items() if "served" not in counts.outcomes()} == lost & served.keys()


@pytest.mark.parametrize("capture", ["passes", "inputs"])
def test_it_ends_the_start_where_its_graphs_are_required(
    vllm_here: Any, capture: str, used: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, name), *when, lost = CAPTURES[capture]
    monkeypatch.setattr(owner, name, raising(getattr(owner, name), *when))
    for feature in lost:
        monkeypatch.setenv(gate_of(feature), "on")
    with pytest.raises(FeatureRequired, match="out of memory"), both(vllm_here):
        pass
