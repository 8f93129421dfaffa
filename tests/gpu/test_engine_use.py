# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, an engine counts those features as used whose code it runs, on either model runner."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_hwplugin_lab import bench

from .engines import SMALL_ENGINE

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = bench.find_checkpoints(None)


def v2_can_be_shut_down() -> bool:
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    return "def shutdown(" in (Path(folder) / "v1/worker/gpu/model_runner.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("method", "k", "v2_runner", "used"),
    [
        ("eagle3", 3, False, {"draft-full-graph", "draft-loop-graph"}),
        ("eagle3", 3, True, set()),
        ("dflash", 7, False, {"draft-full-graph", "dflash-full-graph"}),
        # CUDA's rms_norm takes a weight row a layer, so not even dflash-context-norm has anything to do.
        ("dflash", 7, True, set()),
    ],
    ids=["eagle3 V1", "eagle3 V2", "dflash V1", "dflash V2"],
)
def test_what_an_engine_uses(method: str, k: int, v2_runner: bool, used: set[str]) -> None:
    version = Version(importlib.metadata.version("vllm"))
    if method == "dflash" and v2_runner and version < Version("0.24.0"):
        pytest.skip(f"Model Runner V2 has no DFlash before vLLM 0.24.0, this is {version}")
    if v2_runner and not v2_can_be_shut_down():
        pytest.skip(f"Model Runner V2 of vLLM {version} has no shutdown, so its engine ends with an error")
    if method == "dflash" and version < Version("0.21.0"):
        # There the draft's configuration is made by the feature, whichever backend it comes to.
        used = used | {"dflash-draft-backend"}
    if not v2_runner:
        used = used | {"v1-step-inputs", "v1-draft-phase"}
    if v2_runner and version >= Version("0.24.0"):
        used = used | {"v2-tail-graph", "v2-step-inputs"}
    if method == "eagle3" and v2_runner and version < Version("0.28.0"):
        used = used | ({"v2-fused-drafts"} if version >= Version("0.21.0") else {"v2-draft-metadata"})
    if method == "eagle3" and v2_runner and Version("0.21.0") <= version < Version("0.26.0"):
        used = used | {"v2-capture-metadata"}
    speculation = {"method": method, "model": str(SMALL.drafter(method)), "num_speculative_tokens": k}
    job = bench.Job(
        label=f"{method} {'V2' if v2_runner else 'V1'}",
        patched=True,
        options={**SMALL_ENGINE, "model": str(SMALL.target), "speculative_config": speculation},
        environment=bench.engine_environment("cuda", patched=True, v2_runner=v2_runner),
        workloads=(bench.Workload("few", bench.load_prompts(SMALL, 4), 16, batch=4, rounds=1),),
    )
    outcome = bench.launch(job, timeout=400)
    assert outcome.error is None, outcome.log_tail
    # The process that looks at a model class for the first time has a run record, too, but no engine.
    (process,) = [entry for entry in outcome.records if entry["uses"]]
    live = {name for name, feature in process["features"].items() if feature["state"] == "live"}
    assert process["uses"].keys() == live - {"engine-report", "step-metrics"}
    assert {name for name, use in process["uses"].items() if use["used"]} == used
    # The graphs themselves, not only what is said of them.
    assert ("FULL drafter graphs" in process["decisions"].get("draft-full-graph", "")) == ("draft-full-graph" in used)
