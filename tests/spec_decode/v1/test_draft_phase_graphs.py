# SPDX-License-Identifier: Apache-2.0
"""What captures of the draft phase need, and when they are given up. `test_order_of_calls` compares their drafts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm_hwplugin.base import run_records
from vllm_hwplugin.spec_decode.decode_batch import GraphShape
from vllm_hwplugin.spec_decode.v1 import draft_phase
from vllm_hwplugin.spec_decode.v1.draft_phase import DraftPhase
from vllm_hwplugin.spec_decode.v1.draft_phase_graphs import PhaseGraphs, PhaseRecorder

from ..engines import DRAFTS, HIDDEN
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


@pytest.mark.parametrize(("profiled", "captured"), [(5, 4), (3, 2)])
def test_the_memory_profile_needs_what_the_largest_shape_needs_and_leaves_the_allocator_as_it_was(
    vllm_here: Any, monkeypatch: pytest.MonkeyPatch, profiled: int, captured: int
) -> None:
    """What is recorded then is kept until the ranks of tensor parallelism have exchanged what it reads.

    What is given back here, vLLM's next run would take again, and be charged with for each graph.
    """
    behind, record, empty = DraftPhase.capture_behind, PhaseRecorder.record, torch.empty
    given, shapes, made, exchanged, held = list[Any](), list[int](), list[Any](), list[bool](), [130 << 20]

    def watched(self: PhaseRecorder, shape: GraphShape, *args: Any) -> PhaseGraphs:
        graphs = record(self, shape, *args)
        shapes.append(shape.num_reqs)
        made.append(weakref.ref(graphs))
        return graphs

    def gives_back() -> int:
        held[0] = 34 << 20
        return held[0]

    def takes(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            held[0] += size[0]
        return empty(*size, **options)

    monkeypatch.setattr(
        DraftPhase, "capture_behind", lambda self, *args, **how: given.append(args) or behind(self, *args, **how)
    )
    with both(vllm_here) as sides:
        _, template = given[0]
        monkeypatch.setattr(PhaseRecorder, "record", watched)
        monkeypatch.setattr(draft_phase, "settle_all_reduce", lambda: exchanged.append(made[0]() is not None))
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: held[0])
        monkeypatch.setattr(draft_phase, "reserved_memory", gives_back)
        monkeypatch.setattr(torch, "empty", takes)
        phase = sides.both[1].runner.draft_phase
        phase.captured = None
        with torch.inference_mode():
            behind(phase, torch.zeros(profiled * WIDTH, HIDDEN), template, profiling=True)
    assert (shapes, exchanged) == ([captured], [True])
    assert made[0]() is None
    assert held == [130 << 20]


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
