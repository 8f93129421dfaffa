# SPDX-License-Identifier: Apache-2.0
"""Both model runners in CUDA graphs on the simulated device, with requests that are aborted and preempted: after each
step all bytes of the KV cache are those of a run that never wrote a rejected draft.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin.base.features import gate_of

from ..nwor.runs import GRAPHS, Job, Run, differing, side_by_side
from . import loads
from .loads import Engine

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

OPTIONS = Engine("eagle3").on_musa()
ENGINE = Job(OPTIONS, loads.mixed())
TOLD = Job(OPTIONS, loads.mixed(), oracle="restore")


@pytest.fixture(scope="module", params=["V1", "V2"])
def runs(
    request: pytest.FixtureRequest, musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp(f"nwor on {request.param}")
    common = {"VLLM_USE_V2_MODEL_RUNNER": "1" if request.param == "V2" else "0"}

    def host(mode: str, **variables: str) -> dict[str, str]:
        made = {**loads.UNPATCHED, gate_of("engine-report"): "auto", **common, "VLLM_HWPLUGIN_NWOR_MODE": mode}
        return loads.musa(folder / f"host of {mode}", newest, **{**made, **variables})

    graphs = {gate_of(feature): "auto" for feature in GRAPHS[request.param]}
    restoring = host("restore", VLLM_HWPLUGIN_NWOR_DEBUG_SYNC="1", **graphs)
    found = side_by_side(folder, {"on": ({"restore": ENGINE}, restoring), "off": ({"never": TOLD}, host("off"))})
    assert {one.runner for one in found.values()} == {request.param}
    return found


def test_the_cache_is_as_in_a_run_that_never_wrote_rejected_drafts(runs: dict[str, Run]) -> None:
    never, restored = runs["never"], runs["restore"]
    assert restored.num_rejected > 100
    assert restored.preempted
    assert "nwor" in restored.used
    for kind in ("target", "drafter"):
        assert differing(restored, never, kind) == []


def test_other_features_graphs_serve_meanwhile(runs: dict[str, Run]) -> None:
    restored = runs["restore"]
    assert set(GRAPHS[restored.runner]) - {"v2-graph-addresses"} <= set(restored.used)
