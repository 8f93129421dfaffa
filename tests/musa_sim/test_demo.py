# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin demo`` on a simulated Moore Threads host: both sides need the plugin's platform class there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import patience

from . import simulated

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

#: The command, with engines that are small enough for Triton's interpreter, and the two of one method.
DEMO = """
import sys

from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.cli import demo as command
from vllm_hwplugin.cli import run

whole = bench.engine_options


def small(device, **asked):
    options = whole(device, **{**asked, "max_model_len": 192, "max_num_seqs": 2})
    # Inductor generates no code for MUSA in torch's own build.
    graphs = {**options["compilation_config"], "mode": 0, "cudagraph_capture_sizes": [4, 8]}
    # The warm-up looks into compiled kernels, which the interpreter has not.
    return {
        **options,
        "compilation_config": graphs,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 192,
        "kernel_config": {"enable_jit_warmup": False},
    }


bench.engine_options = small
command.ROUNDS = 1
command.CONFIGURATIONS = [one for one in command.CONFIGURATIONS if one.method == "eagle3"]
sys.exit(run(["demo", "--prompts", "2", "--tokens", "6", "--json", sys.argv[1]]))
"""


def used(row: dict[str, Any]) -> set[str]:
    return {name for process in row["processes"] for name, use in process["uses"].items() if use["used"]}


def live(row: dict[str, Any]) -> set[str]:
    return {
        name for process in row["processes"] for name, state in process["features"].items() if state["state"] == "live"
    }


def test_both_sides_run_on_the_plugins_platform_class(musa_host: None, tmp_path: Path) -> None:
    environment = {
        **simulated.environment(tmp_path, mate=True),
        "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache"),
    }
    file = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-c", DEMO, str(file)], env=environment, capture_output=True, text=True, timeout=patience(300)
    )
    assert file.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    demo = json.loads(file.read_text())
    stock, patched = demo["configurations"]
    assert (demo["host"]["device"], demo["host"]["name"]) == ("musa", "MTT S5000")
    assert [(row["patched"], row["error"]) for row in (stock, patched)] == [(False, None), (True, None)]
    assert {row["platform"] for row in (stock, patched)} == {"vllm_hwplugin.musa.platform.MusaPlatform"}
    assert demo["ok"]
    assert [(row["texts_equal"], row["texts"]) for row in (stock, patched)] == [(2, 2)] * 2
    assert stock["acceptance_length"] == patched["acceptance_length"] > 1
    # Features are live and used on the patched side alone.
    assert live(stock) == used(stock) == set()
    assert {"draft-full-graph", "draft-loop-graph"} <= used(patched)
    assert stock["environment"]["VLLM_HWPLUGIN"] == "1"
    assert stock["environment"]["VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"] == "off"
    assert "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH" not in patched["environment"]
