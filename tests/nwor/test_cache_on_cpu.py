# SPDX-License-Identifier: Apache-2.0
"""The real engine on a CPU: after each step all layers hold what those of a run do that wrote no rejected draft."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab import bench

from ..musa_sim import loads
from ..musa_sim.loads import Engine
from .runs import Job, Run, differing, side_by_side

pytestmark = pytest.mark.engine

#: Blocks that requests wait for, which hold what others left; CPU_ATTN takes 32 tokens at least.
OPTIONS = Engine("eagle3", more={"block_size": 32, "num_gpu_blocks_override": 14}).on_cpu()
#: vLLM's top-k takes no batch of random and greedy requests with drafts on a CPU.
REQUESTS = [request for request in loads.mixed() if request.greedy]
ENGINE = Job(OPTIONS, REQUESTS)


@pytest.fixture(scope="module")
def runs(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("nwor")
    told = {
        "off": ENGINE,
        "never written": Job(OPTIONS, REQUESTS, oracle="off"),
        "zeros": Job(OPTIONS, REQUESTS, oracle="off", zeros=True),
    }
    checked = {"VLLM_HWPLUGIN_NWOR_DEBUG_SYNC": "1"}
    modes = {mode: ({mode: ENGINE}, {**environment(mode), **checked}) for mode in ("restore", "scrub")}
    return side_by_side(folder, {"off": (told, environment("off")), **modes})


def environment(mode: str) -> dict[str, str]:
    return loads.cpu(VLLM_HWPLUGIN="1", VLLM_HWPLUGIN_NWOR_MODE=mode)


def test_drafts_are_rejected_and_without_the_feature_they_stay(runs: dict[str, Run]) -> None:
    assert runs["off"].num_rejected > 50
    assert "nwor" not in runs["off"].used
    assert len(differing(runs["off"], runs["never written"], "target")) > 20


@pytest.mark.parametrize(("mode", "expected"), [("restore", "never written"), ("scrub", "zeros")])
def test_all_layers_are_as_in_a_run_that_never_wrote_them(runs: dict[str, Run], mode: str, expected: str) -> None:
    assert "nwor" in runs[mode].used
    assert differing(runs[mode], runs[expected], "target") == []


@pytest.mark.parametrize("mode", ["restore", "scrub"])
def test_the_drafter_does_not_write_rejected_drafts_either(runs: dict[str, Run], mode: str) -> None:
    assert differing(runs["off"], runs["never written"], "drafter")
    assert differing(runs[mode], runs["never written"], "drafter") == []
