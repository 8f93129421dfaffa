# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, in FULL graphs: after each step all bytes of the target's KV cache are those of a run that never wrote
a rejected draft. On both model runners, in formats of one byte too, with the graphs that other features have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.bench import engine_environment
from vllm_hwplugin.bench._entry_points import provide
from vllm_hwplugin.bench._launch import child_environment
from vllm_hwplugin.spec_decode.features import gate_of

from ..musa_sim import loads
from ..nwor.runs import Job, Run, differing, run
from .mixed_load import options

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Requests of a grammar are left out: compiling it takes another number of steps each time.
REQUESTS = [request for request in loads.mixed() if "structured_outputs" not in request.params]
V2_GRAPHS = {gate_of(feature): "auto" for feature in ("v2-tail-graph", "v2-step-inputs")}


def job(method: str, mode: str, **more: Any) -> Job:
    return Job(options(method, mode) | more, REQUESTS)


def environment(folder: Path, mode: str, runner: str, **more: str) -> dict[str, str]:
    variables = {**loads.VARIABLES, "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0", **more}
    patched = engine_environment("cuda", patched=True, extra={**variables, "VLLM_HWPLUGIN_NWOR_MODE": mode})
    return child_environment(patched, provide(folder / f"metadata {mode}"))


def compare(folder: Path, engine: Job, runner: str, **more: str) -> tuple[Run, Run]:
    """A run without the feature, one that never writes what that has rejected, and one with it."""
    told = Job(engine.options, engine.requests, oracle="off")
    found = run(folder / "off", {"off": engine, "never": told}, environment(folder, "off", runner))
    found |= run(folder / "restore", {"restore": engine}, environment(folder, "restore", runner, **more))
    off, never, restored = found["off"], found["never"], found["restore"]
    assert [off.runner, restored.runner] == [runner, runner]
    assert off.num_rejected > 100
    assert "nwor" in restored.used
    assert restored.decisions["nwor rows"].startswith("by kernels")
    assert differing(off, never, "target")
    assert differing(restored, never, "target") == []
    return never, restored


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_target_holds_no_rejected_draft(runner: str, mode: str, tmp_path: Path) -> None:
    never, restored = compare(tmp_path, job("eagle3", mode), runner)
    assert differing(restored, never, "drafter") == []


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_block_of_drafts(runner: str, tmp_path: Path) -> None:
    compare(tmp_path, job("dflash", "FULL_AND_PIECEWISE"), runner)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_cache_of_float8(runner: str, tmp_path: Path) -> None:
    compare(tmp_path, job("eagle3", "FULL_AND_PIECEWISE", kv_cache_dtype="fp8"), runner)


def test_with_the_graphs_of_other_features(tmp_path: Path) -> None:
    """The restore is a node of the tail's graph there, and each is checked."""
    _, restored = compare(
        tmp_path, job("eagle3", "FULL_AND_PIECEWISE"), "V2", **V2_GRAPHS, VLLM_HWPLUGIN_NWOR_DEBUG_SYNC="1"
    )
    assert {"v2-tail-graph", "v2-step-inputs"} <= set(restored.used)
