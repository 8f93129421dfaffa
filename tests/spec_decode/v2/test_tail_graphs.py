# SPDX-License-Identifier: Apache-2.0
"""What drafting is given, and when it is left to vLLM. That graphs draft as vLLM is shown on the simulated device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.v1.worker.gpu.spec_decode import utils

from vllm_hwplugin import record
from vllm_hwplugin.spec_decode.fused_weights import FusedWeights
from vllm_hwplugin.spec_decode.v2.tail_graphs import TailGraphs

HIDDEN, OTHER = torch.ones(8, 2), torch.ones(8, 4)


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(get_mtp_target_hidden_states=lambda: OTHER),
        # A target has states for MTP layers alone, and another drafter, from 0.32 on.
        SimpleNamespace(get_mtp_target_hidden_states=lambda: None),
    ],
)
def test_drafting_starts_from_the_states_that_vllm_gives_a_drafter(model: Any) -> None:
    if not hasattr(utils, "get_drafter_hidden_states"):
        pytest.skip("this vLLM has no function for it")
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=2, model=model))
    assert graphs._draft_hidden_states(HIDDEN).equal(utils.get_drafter_hidden_states(model, HIDDEN))


def test_fused_weights_that_do_not_fit_leave_the_step_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(record, "use", lambda *said: noted.append(said))
    draft = SimpleNamespace(model=SimpleNamespace(fused=torch.ones(2, 3)))
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=2, sample=lambda *_: "vLLM's"))
    graphs._fused = FusedWeights(draft)
    forgotten: list[str] = []
    graphs.add(SimpleNamespace(forget=lambda: forgotten.append("inputs")))  # type: ignore[arg-type]
    graphs.held = object()  # type: ignore[assignment]
    draft.model.fused = torch.ones(2, 4)
    assert graphs.sample(HIDDEN, SimpleNamespace(num_reqs=1), None) == "vLLM's"
    assert graphs.held is None
    assert forgotten == ["inputs"]
    assert noted == [("v2-tail-graph", False, "the draft model's fused has another shape or type than at capture")]
