"""The real vLLM on a CPU, stock and patched, on trained checkpoints in float32.

Expected figures: DFlash on 8 prompts of 48 tokens makes 122 drafts in a plain torch implementation of the same models,
and so must vLLM when every layer's context keys get their own norm weight; vLLM 0.32.0 on a CPU makes 168. Where two
tokens are nearly as likely, processors round to one or the other, and a draft more or less follows.
"""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import rounds_entry
from vllm_hwplugin_lab.cli.demo import CONFIGURATIONS, WORKLOAD

pytestmark = pytest.mark.engine

PLAIN_TORCH, ONE_ROW_FOR_ALL_LAYERS, NEAR_TIES = 122, 168, 6
NAMES = [c.name for c in CONFIGURATIONS]


def test_the_demo_succeeds_and_says_by_what(demo):
    assert demo["code"] == 0, demo["screen"]
    assert list(demo["rows"]) == NAMES
    for name in NAMES:
        assert f"{name}: done" in demo["screen"]
    (verdict,) = [line for line in demo["screen"].splitlines() if line.startswith("Verdict: ")]
    assert verdict.startswith("Verdict: OK.")
    assert "DFlash patched" in verdict
    assert "dflash-context-norm" in verdict
    assert "Eagle3 patched" not in verdict


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_equal_those_without_speculation(demo, name):
    row = demo["rows"][name]
    assert (row["texts_equal"], row["texts"]) == (8, 8)


def test_eagle3_accepts_what_stock_accepts(demo):
    stock, patched = demo["rows"]["Eagle3 stock"], demo["rows"]["Eagle3 patched"]
    assert patched["drafts"] == stock["drafts"] > 0
    assert patched["acceptance_per_position"] == stock["acceptance_per_position"]
    assert len(stock["acceptance_per_position"]) == 3


def test_dflash_drafts_as_plain_torch_does_once_patched(demo):
    assert demo["rows"]["DFlash stock"]["drafts"] == pytest.approx(ONE_ROW_FOR_ALL_LAYERS, abs=NEAR_TIES)
    assert demo["rows"]["DFlash patched"]["drafts"] == pytest.approx(PLAIN_TORCH, abs=NEAR_TIES)


def test_features_are_live_in_the_patched_processes_alone(demo):
    for name, row in demo["rows"].items():
        live = {
            feature for p in row["processes"] for feature, state in p["features"].items() if state["state"] == "live"
        }
        assert ("dflash-context-norm" in live) == row["patched"], name
        assert ("draft-full-graph" in live) == row["patched"], name


def test_each_engine_says_which_live_features_it_uses(demo):
    for name, mine in (("Eagle3 patched", []), ("DFlash patched", ["dflash-context-norm"])):
        (process,) = demo["rows"][name]["processes"]
        live = {feature for feature, state in process["features"].items() if state["state"] == "live"}
        # The feature that makes the report is not in it.
        assert live - process["uses"].keys() == {"engine-report"}
        assert [feature for feature, use in process["uses"].items() if use["used"]] == mine
        assert process["uses"]["draft-full-graph"]["reason"].startswith("the target's cudagraph_mode is NONE")
    assert "uses dflash-context-norm; not " in demo["screen"]


def test_the_decision_is_recorded_where_the_op_was_asked(demo):
    (process,) = demo["rows"]["DFlash patched"]["processes"]
    decisions = {k: v for k, v in process["decisions"].items() if k.startswith("dflash-context-norm")}
    assert decisions == {
        "dflash-context-norm cpu float32 [2, 64]": "rms_norm does not honour a weight row per layer; "
        "one call a layer instead"
    }
    assert "does not honour a weight row per layer" in demo["screen"]


def test_doctor_shows_the_norm_live_and_no_platform_class_in_the_dflash_engine(demo):
    # The demo's last engine is the patched DFlash.
    (process,) = demo["doctor"]["last_engine"]
    assert process["pid"] == demo["rows"]["DFlash patched"]["processes"][0]["pid"]
    assert process["features"]["dflash-context-norm"]["state"] == "live"
    assert process["decisions"]["platform"].startswith("no platform class")
    assert process["decisions"]["platform"].endswith("vLLM runs on vllm.platforms.cpu.CpuPlatform")
    assert demo["rows"]["DFlash patched"]["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert "platform: no platform class" in demo["screen"]


def test_engine_core_and_worker_in_processes_of_their_own_are_patched_but_for_what_is_off(engine):
    off = ("VLLM_HWPLUGIN_DFLASH_FULL_GRAPH", "off")
    outcome = engine("DFlash patched", 8, 48, (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"), off))
    assert rounds_entry(outcome, WORKLOAD)["drafts"] == pytest.approx(PLAIN_TORCH, abs=NEAR_TIES)
    assert {"parent", "engine-core", "worker"} <= {r["role"] for r in outcome.records}
    assert {r["features"]["dflash-context-norm"]["state"] for r in outcome.records} == {"live"}
    assert {r["features"]["dflash-full-graph"]["state"] for r in outcome.records} == {"off"}
    assert len({r["fingerprint"] for r in outcome.records}) == 1
    asked = {r["role"] for r in outcome.records if any(k.startswith("dflash-context-norm") for k in r["decisions"])}
    assert asked == {"worker"}
    # A process without a worker in it has nothing to say of what a worker uses.
    reported = {r["role"]: r["uses"] for r in outcome.records if r["uses"]}
    assert reported.keys() == {"worker"}
    assert reported["worker"]["dflash-context-norm"]["used"]
