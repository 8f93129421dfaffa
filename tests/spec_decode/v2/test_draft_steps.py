"""Each draft step's metadata in vLLM 0.20, whose graph of all steps, and whose loop without one, made it once."""

from __future__ import annotations

import pytest
import torch

from .released_modules import Graph
from .speculators import DevicePlan, HostPlan, Runner, Views

pytestmark = pytest.mark.usefixtures("known_plans")

VERSION, STOCK = "0.20.2", {"VLLM_HWPLUGIN_V2_DRAFT_METADATA": "off"}
BATCHES = [([2], [20], [0]), ([2, 0, 5], [21, 30, 41], [0, 1, 3]), ([5, 3, 0, 1], [39, 6, 32, 50], [0, 2, 0, 1])]


def drafts_of(modules, builder: type[Views], k: int, captured: bool = True, **choices: str) -> list[torch.Tensor]:
    runner = Runner(modules(VERSION, **choices), VERSION, builder(), k)
    if captured:
        runner.capture()
    runner.admit()
    Graph.replayed.clear()
    return [runner.propose(*batch) for batch in BATCHES]


def agree(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    """Of each place among the drafts, whether all requests have the same there."""
    return (torch.cat(one) == torch.cat(other)).all(0).tolist()


@pytest.mark.parametrize(
    ("builder", "k", "captured"),
    [
        (Views, 4, True),
        (DevicePlan, 4, True),
        (HostPlan, 4, True),
        (HostPlan, 2, True),
        (HostPlan, 4, False),
    ],
)
def test_each_step_has_its_own(modules, notes, builder: type[Views], k: int, captured: bool) -> None:
    right = drafts_of(modules, Views, k, **STOCK)
    # The fault, which a builder that names the batch's own tensors does not show.
    assert all(agree(drafts_of(modules, builder, k, captured, **STOCK), right)) == (builder is Views or k == 2)
    assert all(agree(drafts_of(modules, builder, k, captured), right))
    # All steps are one launch, unless a graph would hold nothing of what the host does between them.
    has_graph = captured and (builder is not HostPlan or k == 2)
    assert len(Graph.replayed) == (len(BATCHES) if has_graph else 0)
    if captured and builder is HostPlan and k > 2:
        assert "HostPlan" in notes["v2-draft-metadata"]
