# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, engines of both model runners are alive together, and each says how long the GPU works in its step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab import bench

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command with every side that this vLLM has."""
    file = tmp_path_factory.mktemp("bench") / "engines.json"
    shape = ["--shape", "0.6b", "--batch", "1", "--batch", "4", "--tokens", "96", "--rounds", "2"]
    command = [sys.executable, "-m", "vllm_hwplugin", "bench", *shape, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(Path(file).read_text())
    return found


def test_each_side_runs_its_runner(measured: dict[str, Any]) -> None:
    (case,) = measured["cases"]
    assert list(case["sides"]) == list(bench.ALL_SIDES)
    runners = {side: entry["model_runner"] for side, entry in case["sides"].items()}
    assert runners == {"stock": "V1", "patched": "V1", "mrv2": "V2", "mrv2-patched": "V2"}


def test_the_gpu_works_for_a_part_of_a_step(measured: dict[str, Any]) -> None:
    (case,) = measured["cases"]
    for entry in case["sides"].values():
        for found in entry["batches"].values():
            assert 0 < found["profile"]["gpu_busy_ms"] < 1.05 * found["step_ms"]["best"]
            assert 0 <= found["gpu_idle_share"] < 0.9
            # The coin that accepts falls 2.5 times a step in the long run.
            assert found["acceptance_length"] == pytest.approx(2.5, abs=0.4)


def test_a_live_load_says_what_its_steps_are_and_how_busy_the_gpu_is(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    sides = ["--shape", "0.6b", "--method", "eagle3", "--side", "mrv2", "--side", "mrv2-patched"]
    load = ["--input-len", "300", "--output-len", "96", "--range-ratio", "0.5", "--concurrency", "8", "--rounds", "1"]
    command = [sys.executable, "-m", "vllm_hwplugin", "bench", "serve", *sides, *load, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(file.read_text())["cases"]
    for side, entry in case["sides"].items():
        (found,) = entry["loads"].values()
        (seconds,), rows = found["seconds"], found["kinds"]
        assert seconds > 4
        assert 0.7 * seconds < sum(row["seconds"] for row in rows) < seconds
        assert {(row["kind"], row["graph"]) for row in rows} >= {
            ("same_requests", "FULL"),
            ("requests_changed", "FULL"),
        }
        # No request comes near the model's length.
        assert sum(row["steps"] for row in rows if row["kind"] == "fewer_drafts") < 0.02 * found["steps"]
        assert 0.1 < found["gpu_busy"] <= 1
        made = {outcome for row in rows if row["kind"] == "same_requests" for outcome in row["paths"].values()}
        assert ("served" in made) == (side == "mrv2-patched")
