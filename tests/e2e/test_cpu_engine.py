"""The real vLLM on a CPU, stock and patched, on trained checkpoints in float32.

Expected figures: DFlash on 8 prompts of 48 tokens makes 122 drafts in a plain torch implementation of the same models,
and so must vLLM when every layer's context keys get their own norm weight; vLLM 0.32.0 on a CPU makes 168. Where two
tokens are nearly as likely, processors round to one or the other, and a draft more or less follows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.cli.demo import CONFIGURATIONS

pytestmark = pytest.mark.engine

PLAIN_TORCH, ONE_ROW_FOR_ALL_LAYERS, NEAR_TIES = 122, 168, 6
NAMES = [c.name for c in CONFIGURATIONS]


@pytest.fixture(scope="module")
def demo(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The demo as a user runs it, on 8 prompts and 48 tokens: its rows by name, and what doctor says after it."""
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    command = [sys.executable, "-m", "vllm_hwplugin.cli", "demo", "-v", "--prompts", "8", "--tokens", "48"]
    environment = {**os.environ, "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "200"}
    done = subprocess.run([*command, "--json", str(file)], env=environment, capture_output=True, text=True)
    result = json.loads(file.read_text())
    # Its exit status is another matter: it also judges the host.
    doctor = subprocess.run(
        [sys.executable, "-m", "vllm_hwplugin.cli", "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    return {
        "code": done.returncode,
        "screen": done.stdout,
        "doctor": json.loads(doctor.stdout),
        "rows": {row["name"]: row for row in result["configurations"]},
    }


def test_the_demo_succeeds_and_says_by_what(demo):
    assert demo["code"] == 0, demo["screen"]
    assert list(demo["rows"]) == NAMES
    (verdict,) = [line for line in demo["screen"].splitlines() if line.startswith("Verdict: ")]
    assert "DFlash patched" in verdict
    assert "dflash-context-norm" in verdict
    assert "Eagle3 patched" not in verdict


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_equal_those_without_speculation(demo, name):
    row = demo["rows"][name]
    assert (row["texts_equal"], row["texts"]) == (8, 8)


def test_eagle3_accepts_what_stock_accepts(demo):
    stock, patched = demo["rows"]["Eagle3 unpatched"], demo["rows"]["Eagle3 patched"]
    assert patched["drafts"] == stock["drafts"] > 0
    assert patched["acceptance_per_position"] == stock["acceptance_per_position"]
    assert len(stock["acceptance_per_position"]) == 3


def test_dflash_drafts_as_plain_torch_does_once_patched(demo):
    assert demo["rows"]["DFlash unpatched"]["drafts"] == pytest.approx(ONE_ROW_FOR_ALL_LAYERS, abs=NEAR_TIES)
    assert demo["rows"]["DFlash patched"]["drafts"] == pytest.approx(PLAIN_TORCH, abs=NEAR_TIES)


def live(process):
    return {feature for feature, state in process["features"].items() if state["state"] == "live"}


def test_features_are_live_in_the_patched_processes_alone_which_say_what_they_use(demo):
    for row in demo["rows"].values():
        for process in row["processes"]:
            assert {"dflash-context-norm", "draft-full-graph"} <= live(process) if row["patched"] else not live(process)
    # V1 with any drafter.
    both = ["backport-prompt-logprobs"]
    for name, mine in (("Eagle3 patched", both), ("DFlash patched", [*both, "dflash-context-norm"])):
        (process,) = demo["rows"][name]["processes"]
        # The features that make the report are not in it.
        assert live(process) - process["uses"].keys() <= {"engine-report", "step-metrics"}
        assert [feature for feature, use in process["uses"].items() if use["used"]] == mine


def test_doctor_shows_the_dflash_engine_with_what_was_decided_in_it(demo):
    # The demo's last engine is the patched DFlash.
    (process,), (ran,) = demo["doctor"]["last_engine"], demo["rows"]["DFlash patched"]["processes"]
    assert process["pid"] == ran["pid"]
    assert "dflash-context-norm" in live(process)
    assert "does not honour a weight row" in ran["decisions"]["dflash-context-norm cpu float32 [2, 64]"]
    assert process["decisions"]["platform"].startswith("no platform class")
    assert demo["rows"]["DFlash patched"]["platform"] == "vllm.platforms.cpu.CpuPlatform"
