# SPDX-License-Identifier: Apache-2.0
"""What captures of the draft phase need, and when they are given up. `test_order_of_calls` compares their drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm_hwplugin.base import run_records

from ..engines import DRAFTS
from ..scheduled_runner import Side
from ..test_order_of_calls import KINDS, both
from ..walks import live_load

WIDTH = 1 + DRAFTS


@pytest.mark.parametrize("of", ["target", "draft"])
def test_a_head_in_the_place_of_another_leaves_every_later_step_to_vllm(
    vllm_here: Any, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """vLLM calls it outside of its own graphs, so it would go on with the new one."""
    uses: dict[str, tuple[bool, str]] = {}
    monkeypatch.setattr(run_records, "use", lambda feature, used, reason="": uses.update({feature: (used, reason)}))
    with both(vllm_here) as sides:
        live_load(sides, KINDS)
        drafting = sides.both[1].runner.draft_phase._drafting
        served = drafting.outcomes()["served"]
        for side in sides.both:
            head = side.models[("target", "draft").index(of)].lm_head
            head.weight = torch.nn.Parameter(head.weight.flip(1), requires_grad=False)
        live_load(sides, KINDS)
    assert drafting.outcomes()["served"] == served > 5
    assert drafting.outcomes()["not_captured"] > 5
    reason = "the weight of a Head is another tensor than at capture"
    given_up = {"v1-draft-phase", *(("draft-full-graph", "draft-loop-graph") if of == "draft" else ())}
    assert {feature for feature, said in uses.items() if said == (False, reason)} == given_up


def test_vllm_samples_within_top_k_and_top_p_where_flashinfer_does(
    vllm_here: Any, monkeypatch: pytest.MonkeyPatch, notes: dict[str, str]
) -> None:
    monkeypatch.setattr(Side, "native", False)
    with both(vllm_here) as sides:
        live_load(sides, [kind for kind in KINDS if "top_p" in kind])
        sampling = sides.both[1].runner.draft_phase._sampling.outcomes()
    assert "a graph would repeat its random numbers" in notes["v1-draft-phase"]
    assert "served" not in sampling
    assert sampling["sampling_parameters"] > 5
